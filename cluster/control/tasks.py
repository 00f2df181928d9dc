"""Background tasks with an owner: none is forgotten, and what breaks one is in the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine

log = logging.getLogger(__name__)

_PAUSE_AFTER_A_BUG_S = 1.0


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
        """Cancels them all, and returns when they have ended."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("task %s broke", task.get_name(), exc_info=task.exception())


async def _forever(step: Callable[[], Awaitable[None]], name: str) -> None:
    while True:
        try:
            await step()
        except Exception:  # a bug: told in the log, and the task goes on
            log.exception("a step of %s broke", name)
            await asyncio.sleep(_PAUSE_AFTER_A_BUG_S)
