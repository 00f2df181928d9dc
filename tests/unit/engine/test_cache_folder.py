"""Where the cache is when there is no home, and that it is nobody else's there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from engine.cache_folder import cache_root, check_private
from engine.errors import ModelError, ModelNotFound
from engine.weights import resolve_model


@pytest.fixture
def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No HOME, and a user without an entry; where the temporary folder is."""

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_without_a_home_there_is_a_private_folder_in_the_temporary_one(homeless: Path) -> None:
    folder = cache_root()
    assert folder == homeless / f"pdserve-{os.geteuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert cache_root() == folder


def test_a_home_that_cannot_be_written_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cache_root() == home / ".cache" / "pdserve"
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert cache_root() == tmp_path / f"pdserve-{os.geteuid()}"
    (home / ".cache").mkdir()  # read-only, and made before
    assert cache_root() == home / ".cache" / "pdserve"


def test_a_folder_that_others_may_write_is_not_taken_for_it(homeless: Path) -> None:
    folder = cache_root()
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="can be written by others"):
        cache_root()


def test_without_a_home_a_model_is_converted_or_refused_by_name(homeless: Path) -> None:
    path = homeless / "model.gguf"
    path.write_bytes(b"no model")
    with pytest.raises(ModelError, match=r"model\.gguf is cut short, or no GGUF"):
        resolve_model(str(path))
    cache_root().chmod(0o777)
    with pytest.raises(ModelError, match="can be written by others"):
        resolve_model(str(path))
    with pytest.raises(ModelNotFound, match="no folder ~/model"):
        resolve_model("~/model")


def test_what_is_not_there_is_passed_over(tmp_path: Path) -> None:
    check_private(tmp_path / "missing")
