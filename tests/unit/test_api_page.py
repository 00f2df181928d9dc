"""docs/api.md is what the protos and the models of HTTP say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("grpc_tools")

ROOT = Path(__file__).parents[2]


def test_the_api_s_page_is_made_from_the_code_of_today() -> None:
    command = [sys.executable, str(ROOT / "docs/make_api.py"), "--print"]
    made = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100).stdout
    assert (ROOT / "docs/api.md").read_text() == made, "docs/api.md: run `make docs`"
    assert "| `tools` | list of anything |  | not served |" in made
    assert "| `temperature` | number |  |  |" in made
