"""A cache, kernels and a compiler of a test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.engine.native.building import Install
from tests.unit.engine.native.kernels import library_or_skip

# Whatever goes wrong, its version is the same, so that its cache is the same.
_VERSION = 'if [ "$1" = --version ]; then echo "g++ Free Software Foundation"; exit 0; fi'


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Given a script, puts it in the compiler's place."""
    library_or_skip()
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def write(script: str) -> None:
        path = folder / "g++"
        path.write_text(f"#!/bin/bash\n{_VERSION}\n{script}\n")
        path.chmod(0o755)

    return write


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    library_or_skip()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pdserve" / "native"


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Kernels that compile at once."""
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "answer.cpp").write_text('extern "C" int answer() { return 42; }\n')
    return folder
