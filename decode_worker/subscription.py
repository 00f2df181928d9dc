"""One router's stream of step outputs: what waits for it, and what happens if it does not read."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.request import NewToken, PrefillReport
from engine.sampling import FinishReason
from kv_transfer.frame import TransferKey
from kv_transfer.handover import HandOver
from pdserve.v1.errors import PdserveError, ResourceExhausted


class StepToken(NamedTuple):
    key: TransferKey
    token: NewToken
    finish_reason: FinishReason | None = None
    prefill: PrefillReport | None = None
    num_drafts: int = 0
    handover: HandOver | None = None


@dataclass(frozen=True, slots=True)
class StepFailure:
    key: TransferKey
    error: PdserveError


@dataclass(slots=True)
class StepBatch:
    """What one step has for one router. Empty: only the worker's load is news."""

    tokens: list[StepToken] = field(default_factory=list)
    failures: list[StepFailure] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.tokens and not self.failures


class Subscription:
    """Used on the asyncio loop only. `put` never waits: a router that lets more than `max_pending` batches
    pile up is cut off, because nothing may buffer for ever and nothing may be left out."""

    def __init__(self, router_id: str, max_pending: int) -> None:
        self.router_id = router_id
        self.error: PdserveError | None = None
        self._max_pending = max_pending
        self._pending: deque[StepBatch] = deque()
        self._changed = asyncio.Event()
        self._writing: asyncio.Task[object] | None = None

    def put(self, batch: StepBatch) -> bool:
        """False: the router is too far behind, and has just been cut off."""
        if self.error is not None or (batch.is_empty and self._pending):
            return True  # over, or the next message tells the load anyway
        if len(self._pending) >= self._max_pending:
            behind = f"router {self.router_id} is {len(self._pending)} steps behind"
            self.cut(ResourceExhausted(behind, reason="SLOW_ROUTER"))
            return False
        self._pending.append(batch)
        self._changed.set()
        return True

    def finish(self, error: PdserveError) -> None:
        """Ends with `error` behind what is waiting."""
        self.error = self.error or error
        self._changed.set()

    def cut(self, error: PdserveError) -> None:
        """Ends with `error` now, also in the middle of a write that the router does not take."""
        self._pending.clear()
        self.finish(error)
        if self._writing is not None:
            self._writing.cancel()

    async def deliver(self, write: Callable[[StepBatch], Awaitable[None]]) -> None:
        """Writes batch after batch; ends by raising `error`, or by being cancelled."""
        while True:
            batch = await self._next()
            self._writing = asyncio.current_task()
            try:
                await write(batch)
            except asyncio.CancelledError:
                if self.error is not None:
                    raise self.error from None
                raise
            finally:
                self._writing = None

    async def _next(self) -> StepBatch:
        while not self._pending:
            if self.error is not None:
                raise self.error
            self._changed.clear()
            await self._changed.wait()
        return self._pending.popleft()
