from __future__ import annotations

from tests.integration.router.conftest import model_dir

__all__ = ["model_dir"]
