"""Generations in flight over gRPC. A router that stops ends what is left with a status of its own: one that
its server cancels would tell the client nothing but that."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pdserve.v1.errors import Unavailable


def stopping() -> Unavailable:
    return Unavailable("the router stops", reason="STOPPING")


class Calls:
    """Each call's task, while it is inside `one`."""

    def __init__(self) -> None:
        self._open: set[asyncio.Task[object]] = set()
        self._ended: set[asyncio.Task[object]] = set()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Around a call's work: raises Unavailable once `end` was called."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a call is answered by a task")
        self._open.add(task)
        try:
            yield
        except asyncio.CancelledError as error:
            if task not in self._ended:
                raise
            if sys.version_info >= (3, 11):
                task.uncancel()
            raise stopping() from error
        finally:
            self._open.discard(task)
            self._ended.discard(task)

    def end(self) -> None:
        for task in self._open - self._ended:
            self._ended.add(task)
            task.cancel()
