"""Background tasks with an owner: none is forgotten, and what breaks one is in the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

_PAUSE_AFTER_A_BUG_S = 1.0
_CANCEL_AGAIN_S = 1.0
T = TypeVar("T")


class Tasks:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[object, object, None], name: str) -> None:
        task = asyncio.ensure_future(work)
        task.set_name(name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def repeat(self, step: Callable[[], Awaitable[None]], name: str) -> None:
        """`step` again and again. What keeps the cluster alive outlives its own bugs."""
        self.start(_forever(step, name), name)

    async def close(self) -> None:
        """Cancels them all, and returns when they have ended.

        More than once: before Python 3.12, `asyncio.wait_for` drops a cancel that comes in the very moment in
        which it has a result.
        """
        while self._tasks:
            for task in tuple(self._tasks):
                task.cancel()
            await asyncio.wait(tuple(self._tasks), timeout=_CANCEL_AGAIN_S)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("task %s broke", task.get_name(), exc_info=task.exception())


class Once(Generic[T]):
    """Work that several may ask for and that is done once, whoever of them still waits. What failed is done
    anew for the next."""

    def __init__(self, work: Callable[[], Coroutine[object, object, T]]) -> None:
        self._work = work
        self._task: asyncio.Task[T] | None = None

    async def done(self) -> T:
        """Raises what the work does."""
        if self._task is None or _has_failed(self._task):
            self._task = asyncio.ensure_future(self._work())
        return await asyncio.shield(self._task)


def _has_failed(task: asyncio.Task[T]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


async def _forever(step: Callable[[], Awaitable[None]], name: str) -> None:
    while True:
        try:
            await step()
        except Exception:  # a bug: told in the log, and the task goes on
            log.exception("a step of %s broke", name)
            await asyncio.sleep(_PAUSE_AFTER_A_BUG_S)
