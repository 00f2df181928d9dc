"""A time limit on the current task, whatever it waits for. (Python 3.10 has no asyncio.timeout.)"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from typing_extensions import Self

from pdserve.v1.errors import DeadlineExceeded


class Deadline:
    """`async with Deadline(seconds)`: cancels what the task waits for and raises DeadlineExceeded.
    `spent_s`: what went by of it before. `why`: what it waits for, if known, for the error.
    `early_s`: whoever set it may give up so much sooner, by a clock of its own."""

    def __init__(
        self,
        timeout_s: float,
        spent_s: float = 0.0,
        why: Callable[[], str | None] = lambda: None,
        early_s: float = 0.0,
    ) -> None:
        self._timeout_s = timeout_s
        self._spent_s = spent_s
        self._why = why
        self._early_s = early_s
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[object] | None = None
        # The loop's clock.
        self._ends_at: float | None = None
        self.has_passed = False
        self._is_put_off = False

    @property
    def left_s(self) -> float:
        """Since it was entered; before, all of it. Not below 0."""
        if self._ends_at is None:
            return max(0.0, self._timeout_s - self._spent_s)
        return max(0.0, self._ends_at - asyncio.get_running_loop().time())

    @property
    def is_over(self) -> bool:
        """By this clock or by that of whoever set it: work that is cancelled now is late."""
        return self.has_passed or self.left_s <= self._early_s

    async def __aenter__(self) -> Self:
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        self._ends_at = loop.time() + max(0.0, self._timeout_s - self._spent_s)
        self._timer = loop.call_at(self._ends_at, self._expire)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self.has_passed:
            return
        if self._task is not None and sys.version_info >= (3, 11):
            self._task.uncancel()
        if kind is asyncio.CancelledError:
            raise self._error() from error

    @contextmanager
    def put_off(self) -> Iterator[None]:
        """What waits inside is let wait, and DeadlineExceeded raised behind it. For a message on its way to a
        client that does not read: no status can pass it.
        """
        self._is_put_off = True
        try:
            yield
        finally:
            self._is_put_off = False
        if self.has_passed:
            raise self._error()

    def _error(self) -> DeadlineExceeded:
        why = self._why()
        return DeadlineExceeded(f"not done within {self._timeout_s:g} s{f': {why}' if why else ''}")

    def _expire(self) -> None:
        self.has_passed = True
        if self._task is not None and not self._is_put_off:
            self._task.cancel()
