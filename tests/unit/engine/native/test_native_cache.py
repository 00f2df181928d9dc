"""What lies in the cache of kernels: damaged, it is compiled again; another's, it is never loaded."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.errors import NativeUnavailable
from engine.manifest import MANIFEST, write_manifest
from engine.native.build import LIBRARY, build_library, open_library
from tests.unit.engine.native.building import build

_NOBODY = 65534


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def _garbage(folder: Path) -> None:
    # Another file in its place: this process has loaded the old one, and still executes it when it ends.
    (folder / LIBRARY).unlink()
    (folder / LIBRARY).write_text("garbage, and a manifest that says so")
    (folder / MANIFEST).unlink()
    write_manifest(folder)


def _list(folder: Path) -> None:
    (folder / MANIFEST).write_text("[1]")


def _empty_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text("{}")


def _manifest_folder(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).mkdir()


def _library_folder(folder: Path) -> None:
    (folder / LIBRARY).unlink()
    (folder / LIBRARY).mkdir()


@pytest.mark.parametrize("hurt", [_garbage, _list, _empty_manifest, _manifest_folder, _library_folder])
def test_what_is_not_a_whole_library_is_compiled_again_once(
    cache: Path, sources: Path, hurt: Callable[[Path], None]
) -> None:
    path, _ = build(sources)
    hurt(path.parent)
    assert build(sources) == (path, True)
    assert open_library(path).answer() == 42
    assert build(sources) == (path, False)


def test_a_cached_library_that_lacks_functions_is_compiled_again_once(cache: Path, sources: Path) -> None:
    build(sources)
    told: list[str] = []

    def refuse(library: Path) -> None:
        raise NativeUnavailable(f"{library.name} has no such function")

    with pytest.raises(NativeUnavailable, match="no such function"):
        build_library(told.append, sources, refuse)
    assert len([line for line in told if line.startswith("compiling")]) == 1


@pytest.mark.usefixtures("open_umask")
def test_nobody_else_can_write_what_is_built(cache: Path, sources: Path) -> None:
    path, _ = build(sources)
    for each in (cache.parent, cache, path.parent, path, path.parent / MANIFEST):
        assert stat.S_IMODE(each.stat().st_mode) & 0o077 == 0, each
    assert build(sources) == (path, False)


def _give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(path, _NOBODY, _NOBODY)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: _NOBODY)


@pytest.mark.parametrize("way", ["another's", "written by the group", "written by all"])
@pytest.mark.parametrize("place", ["root", "native", "key", "library", "manifest"])
def test_what_others_may_have_planted_is_not_loaded(
    cache: Path, sources: Path, monkeypatch: pytest.MonkeyPatch, place: str, way: str
) -> None:
    library, _ = build(sources)
    folder = library.parent
    planted = {
        "root": cache.parent,
        "native": cache,
        "key": folder,
        "library": library,
        "manifest": folder / MANIFEST,
    }[place]
    if way == "another's":
        _give_away(planted, monkeypatch)
    else:
        planted.chmod(planted.stat().st_mode | (stat.S_IWGRP if "group" in way else stat.S_IWOTH))
    loaded: list[Path] = []
    with pytest.raises(NativeUnavailable, match="delete it, or set XDG_CACHE_HOME"):
        build_library(lambda _: None, sources, loaded.append)
    assert loaded == []


def test_a_library_in_a_cache_that_cannot_be_written_is_used(
    cache: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = build(sources)

    def read_only(*_: object, **__: object) -> None:
        raise OSError("Read-only file system")

    monkeypatch.setattr(os, "rename", read_only)
    monkeypatch.setattr("tempfile.mkdtemp", read_only)
    assert build(sources) == (path, False)
    shutil.rmtree(path.parent)
    with pytest.raises(NativeUnavailable, match="cache of kernels cannot be used: Read-only"):
        build(sources)
