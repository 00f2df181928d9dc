"""What this machine does in a second, with the threads that the engine has: measured again and again beside
the rows, for machines whose speed drifts.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from engine.errors import NativeUnavailable
from engine.huge_pages import allocate_huge
from engine.layout import DTYPES
from engine.native.build import build_library
from pdserve.bench.errors import BenchError
from pdserve.bench.work import Rates

log = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "src"
_READ_BYTES = 512 * 2**20  # far more than any cache
_ROWS, _DEPTH, _COLUMNS = 1024, 1024, 2048
_NUM_TRIES = 5


def pin(num_threads: int) -> list[int]:
    """Holds this process, threads to come too, to the first cores that it may use. Raises BenchError."""
    cores = sorted(os.sched_getaffinity(0))[:num_threads]
    if len(cores) < num_threads:
        raise BenchError(f"{num_threads} threads want as many cores, this process may use {len(cores)}")
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cores)
        except ProcessLookupError:
            pass  # it ended a moment ago
    return cores


class Machine:
    """The best of a few tries each time: what other work on the machine takes away is not its limit."""

    def __init__(
        self,
        dtype: str,
        num_threads: int,
        progress: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`clock`: the seconds that count."""
        self._num_threads = num_threads
        self._clock = clock
        self._rows = torch.randn(_ROWS, _DEPTH).to(DTYPES[dtype])
        self._weight = torch.randn(_COLUMNS, _DEPTH).to(DTYPES[dtype])
        self._memory = allocate_huge(_READ_BYTES).view(torch.float32).fill_(1)
        self._kernel = _read_kernel(progress)

    @torch.inference_mode()
    def measure(self) -> Rates:
        operations = 2 * _ROWS * _DEPTH * _COLUMNS
        multiply_s, read_s = (_best_s(run, self._clock) for run in (self._multiply, self._read))
        return Rates(operations / multiply_s, self._memory.nbytes / read_s)

    def _multiply(self) -> None:
        torch.nn.functional.linear(self._rows, self._weight)

    def _read(self) -> None:
        if self._kernel is None:
            self._memory.amax()
        else:
            self._kernel(self._memory.data_ptr(), self._memory.nbytes, self._num_threads)


def _read_kernel(progress: Callable[[str], None]) -> Callable[[int, int, int], int] | None:
    """None where nothing can be compiled: torch's own loop then reads, up to a fifth slower."""
    try:
        library = ctypes.CDLL(str(build_library(progress, _SOURCES)))
    except (NativeUnavailable, OSError) as error:
        log.warning(
            "the memory's rate is measured with torch, which may read slower than it could: %s", error
        )
        return None
    function = library.pdserve_read
    function.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    function.restype = ctypes.c_uint64
    kernel: Callable[[int, int, int], int] = function
    return kernel


def _best_s(run: Callable[[], None], clock: Callable[[], float]) -> float:
    times: list[float] = []
    for _ in range(_NUM_TRIES):
        began = clock()
        run()
        times.append(clock() - began)
    return min(times)
