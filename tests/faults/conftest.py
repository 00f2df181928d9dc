"""A tiny model, and workers of it whose blocks hold NaN until they are computed: none may be shipped."""

from __future__ import annotations

from tests.integration.workers.conftest import (
    cluster,
    folder,
    loaded,
    make_loop,
    no_uncomputed_kv_arrives,
    reference,
)

__all__ = ["cluster", "folder", "loaded", "make_loop", "no_uncomputed_kv_arrives", "reference"]
