"""Compilers that go wrong: none stops a model from loading, stays behind, or leaves what cannot be loaded."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from cluster.config import PoolConfig
from engine.errors import NativeUnavailable
from engine.native import build as native_build
from engine.native.build import BUILD_TIMEOUT_S, open_library
from engine.native.load import library_for
from tests.integrity import wait_until
from tests.unit.engine.native.building import WORKING, Install, build

GARBAGE = 'while [ $# -gt 0 ]; do [ "$1" = -o ] && echo garbage > "$2"; shift; done'


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_what_is_not_utf8_is_told_and_auto_goes_on(cache: Path, install: Install, caplog) -> None:
    install(r'printf "kernels.cpp: error: \xe9\xff bad\n" >&2; exit 1')
    with caplog.at_level(logging.WARNING):
        kernels = library_for("auto", torch.device("cpu"), torch.float32, lambda _: None)
    assert kernels.library is None
    assert kernels.told.startswith("torch: ")
    assert kernels.told.endswith("g++ cannot compile the kernels: kernels.cpp: error: �� bad")
    assert any("kernels.cpp: error: �� bad" in line for line in caplog.messages)


@pytest.mark.parametrize("wrong", ["exit 0", GARBAGE, "kill -9 $$"])
def test_what_cannot_be_loaded_is_not_kept(cache: Path, sources: Path, install: Install, wrong: str) -> None:
    install(wrong)
    for _ in range(2):
        with pytest.raises(NativeUnavailable, match=r"g\+\+"):
            build(sources)
    assert [path for path in cache.iterdir() if path.is_dir()] == []
    install(WORKING)
    path, was_compiled = build(sources)
    assert was_compiled
    assert open_library(path).answer() == 42
    assert build(sources) == (path, False)


def test_a_file_that_is_no_program_is_told(
    cache: Path, sources: Path, install: Install, tmp_path: Path
) -> None:
    install("")
    (tmp_path / "bin" / "g++").write_bytes(b"\x7fnothing")
    with pytest.raises(NativeUnavailable, match="cannot be run"):
        build(sources)


def test_a_hung_compiler_ends_in_time_with_all_that_it_started(
    cache: Path, sources: Path, install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(f'sleep 1000 & echo $! > "{tmp_path}/new"; mv "{tmp_path}/new" "{tmp_path}/pid"; wait')
    monkeypatch.setattr(native_build, "BUILD_TIMEOUT_S", 5.0)
    with pytest.raises(NativeUnavailable, match="not done in time"):
        build(sources)
    pid = int((tmp_path / "pid").read_text())
    assert wait_until(lambda: is_gone(pid))
    assert [path for path in cache.iterdir() if path.is_dir()] == []


def test_whoever_waited_too_long_for_another_compiles_nothing(
    cache: Path, sources: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(WORKING)
    build(sources)  # the folders are there
    (sources / "answer.cpp").write_text('extern "C" int answer() { return 43; }\n')
    times = iter([0.0, BUILD_TIMEOUT_S / 2])
    monkeypatch.setattr(time, "monotonic", lambda: next(times, BUILD_TIMEOUT_S + 1))
    with pytest.raises(NativeUnavailable, match="not done in time"):
        build(sources)


@pytest.fixture
def heard_ctrl_c() -> Iterator[None]:
    """Also where the tests run in a shell's background, which has them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard_ctrl_c")
def test_ctrl_c_ends_the_compilers(cache: Path, sources: Path, install: Install, tmp_path: Path) -> None:
    (sources / "second.cpp").write_text("int second;\n")
    # Only one of the two sends it: another one could come when the first was taken already.
    once = f'mkdir "{tmp_path}/sent" 2>/dev/null && kill -INT $PPID'
    install(f'echo $$ > "{tmp_path}/$(basename "${{@: -3:1}}").pid"; {once}; exec sleep 1000')
    with pytest.raises(KeyboardInterrupt):
        build(sources)
    pids = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    assert pids
    assert wait_until(lambda: all(map(is_gone, pids)))
    assert [path for path in cache.iterdir() if path.is_dir()] == []


def test_a_build_leaves_a_start_time_for_the_rest() -> None:
    assert PoolConfig.model_fields["start_timeout_s"].default >= BUILD_TIMEOUT_S + 45
