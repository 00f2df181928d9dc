"""How an engine comes along, for whoever must tell work from a stall."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# A step's weight in the estimate of the next one's time.
_NEWEST = 0.2


@dataclass(frozen=True, slots=True)
class Reading:
    """Of one moment. While `is_working` and not `is_compiling`, `count` must move."""

    count: int
    is_working: bool
    is_compiling: bool
    # About how long a step takes; 0: there was none yet.
    step_ms: float


class Progress:
    """Written by the engine's thread alone (the kernels add to the counter there), read by any thread.

    The counter moves with every layer of a step, every step, and every call between steps.
    """

    def __init__(self) -> None:
        self._count = ctypes.c_int64(0)
        # The thread computes or answers a call; otherwise it sleeps until there is something to do.
        self.is_working = False
        self._num_compiles = 0
        self._step_ms = 0.0

    @property
    def address(self) -> int:
        """Of the counter: an int64, good as long as this lives."""
        return ctypes.addressof(self._count)

    def moved(self) -> None:
        self._count.value += 1

    def stepped(self, step_ms: float) -> None:
        self.moved()
        before = self._step_ms or step_ms
        self._step_ms = before + _NEWEST * (step_ms - before)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Around what may take minutes without a layer."""
        self.compile_began()
        try:
            yield
        finally:
            self.compile_ended()

    def compile_began(self) -> None:
        self._num_compiles += 1

    def compile_ended(self) -> None:
        self._num_compiles -= 1
        self.moved()

    def read(self) -> Reading:
        return Reading(self._count.value, self.is_working, self._num_compiles > 0, self._step_ms)
