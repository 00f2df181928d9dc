"""Ending a task's work from outside, with an error of ours in place of the cancel."""

from __future__ import annotations

import asyncio
import sys
from types import TracebackType

from typing_extensions import Self

from pdserve.v1.errors import PdserveError


class Interruption:
    """`with Interruption() as work`: `work.end(error)` cancels what the task waits for; then it is raised."""

    def __init__(self) -> None:
        self._error: PdserveError | None = None
        self._task: asyncio.Task[object] | None = None

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._error is None:
            return
        if self._task is not None and sys.version_info >= (3, 11):
            self._task.uncancel()
        if kind is asyncio.CancelledError:
            raise self._error from error

    def end(self, error: PdserveError) -> None:
        """The first error counts."""
        if self._error is None:
            self._error = error
            if self._task is not None:
                self._task.cancel()
