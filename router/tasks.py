"""Background tasks with an owner. A task that fails is a bug: it is told at once, never lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Tasks:
    """Owns what it starts. `wait_failed` returns when one of them failed; `close` raises that failure."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[object]] = set()
        self._has_failed = asyncio.Event()
        self.failure: BaseException | None = None

    @property
    def num_running(self) -> int:
        return len(self._running)

    def start(self, work: Coroutine[object, object, T], name: str) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    async def wait_failed(self) -> None:
        await self._has_failed.wait()

    async def join(self) -> None:
        """Wait for all that run now to end by themselves."""
        if self._running:
            await asyncio.wait(set(self._running))

    async def close(self) -> None:
        running = set(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        if self.failure is not None:
            raise self.failure

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._running.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        logger.error("background task %s failed", task.get_name(), exc_info=error)
        self.failure = self.failure or error
        self._has_failed.set()
