"""The machine's own rates, and the cores that we hold ourselves to."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from engine.errors import NativeUnavailable
from pdserve.bench import machine
from pdserve.bench.errors import BenchError
from pdserve.bench.machine import Machine, _read_kernel, pin


@pytest.fixture(autouse=True)
def _small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_READ_BYTES", 2**22)


@pytest.fixture
def _cores_given_back() -> Iterator[None]:
    cores = os.sched_getaffinity(0)
    yield
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # one that ended meanwhile
            os.sched_setaffinity(int(thread), cores)


def test_without_a_compiler_torch_reads_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(progress: Callable[[str], None], sources: Path) -> Path:
        raise NativeUnavailable("there is no compiler")

    monkeypatch.setattr(machine, "build_library", refuse)
    with caplog.at_level(logging.WARNING):
        rates = Machine("float32", 1, lambda _: None).measure()
    assert rates.operations > 0
    assert rates.num_bytes > 0
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["there is no compiler"]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_all_of_the_memory_is_read(num_threads: int) -> None:
    """A sum that leaves out a piece would be another."""
    kernel = _read_kernel(lambda _: None)
    if kernel is None:
        pytest.skip("nothing can be compiled here")
    memory = torch.zeros(2**20, dtype=torch.int32)
    probes = range(0, memory.numel(), 3072)
    num_seen = 0
    for place in probes:
        memory[place] = 1
        num_seen += kernel(memory.data_ptr(), memory.nbytes, num_threads)
        memory[place] = 0
    # Each thread may leave the last lines that its pieces do not share evenly.
    assert num_seen >= len(probes) - num_threads


@pytest.mark.usefixtures("_cores_given_back")
def test_every_thread_is_held_to_the_cores() -> None:
    stopping = threading.Event()
    thread = threading.Thread(target=stopping.wait)
    thread.start()
    try:
        cores = pin(1)
        assert len(cores) == 1
        assert thread.native_id is not None
        assert os.sched_getaffinity(thread.native_id) == set(cores)
    finally:
        stopping.set()
        thread.join()


def test_more_threads_than_cores_are_refused() -> None:
    with pytest.raises(BenchError, match="9999 threads want as many cores, this process may use"):
        pin(9999)
