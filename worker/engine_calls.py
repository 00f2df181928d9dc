"""From an asyncio loop to the engine's thread and back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from engine.engine import Engine
from engine.errors import EngineError
from engine.loop import EngineLoop
from pdserve.v1.errors import PdserveError

T = TypeVar("T")
log = logging.getLogger(__name__)


async def run_on_engine(loop: EngineLoop, fn: Callable[[Engine], T]) -> T:
    """A caller that is cancelled meanwhile leaves `fn` to run: a call that undoes it, made later, comes after
    it, because calls keep their order."""
    future = loop.call(fn)
    answer = asyncio.wrap_future(future)
    try:
        return await asyncio.shield(answer)
    except asyncio.CancelledError:
        answer.add_done_callback(_report)
        raise


def post_to_engine(loop: EngineLoop, fn: Callable[[Engine], object]) -> None:
    """Nobody waits for it; what it raises is logged. A closed loop has nothing left to undo."""
    loop.call(fn).add_done_callback(_report)


def _report(future: Future[T] | asyncio.Future[T]) -> None:
    error = future.exception() if not future.cancelled() else None
    if isinstance(error, EngineError | PdserveError):
        log.info("a call to the engine was refused: %s", error)
    elif error is not None:
        log.error("a call to the engine failed", exc_info=error)
