"""The router's queue: who may begin, and when.

A request leaves it only when some prefill worker can start it soon; until then it holds nothing anywhere
and can still go to any worker. The queue is bounded for new requests. One that was admitted and comes
back (no room, lost workers) keeps its place in the order and is never refused. One that found no room asks
again alone: smaller ones beside it would take whatever becomes free, and it would never be enough. Where all
memory is other routers', nobody is held back for it: that would make no room.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.v1.errors import ResourceExhausted
from router.attempt import Attempt
from router.fleet.placing import Placing
from router.queue_order import QueuePolicy, Rank


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    attempt: Attempt
    arrival: float
    granted: asyncio.Future[None]


class Admission:
    """`clock` is that of the requests' timelines. `has_room_out`: whether decode memory is taken by requests
    that left this queue, and will come back from them.
    """

    def __init__(
        self,
        max_queued: int,
        policy: QueuePolicy,
        placing: Placing,
        clock: Callable[[], float] = time.monotonic,
        has_room_out: Callable[[], bool] = lambda: True,
    ) -> None:
        self._max_queued = max_queued
        self._policy = policy
        self._placing = placing
        self._clock = clock
        self._has_room_out = has_room_out
        self._waiting: list[Ticket] = []
        self._no_room_timer: asyncio.TimerHandle | None = None
        # Who asks for room again. Until there is an answer nobody else leaves.
        self._asking: Attempt | None = None
        # Since when somebody waits, or since the last one left while others waited; None: nobody does.
        self._waits_since: float | None = None
        self._grant_interval_s = 1.0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waits_for_room(self) -> bool:
        """Whether nobody leaves it because somebody found no room."""
        return self._no_room_timer is not None or self._asking is not None

    @property
    def retry_after_s(self) -> float:
        """About how long the queue takes to move by its length: as it moved of late, or as it stands now."""
        now = asyncio.get_running_loop().time()
        still_s = now - self._waits_since if self._waits_since is not None else 0.0
        return min(30.0, max(0.1, len(self._waiting) * max(self._grant_interval_s, still_s)))

    def refuse_if_full(self, num_more: int = 1) -> None:
        if self._waiting and len(self._waiting) + num_more > self._max_queued:
            raise ResourceExhausted(
                f"the queue is full: {len(self._waiting)} requests wait",
                reason="QUEUE_FULL",
                retry_after_s=self.retry_after_s,
            )

    async def enter(self, attempt: Attempt) -> None:
        """Wait for a place. Leaving by cancel gives up the ticket; a place given is the attempt's.

        Raises DeadlineExceeded, now or later, where there is too little time left for its prompt.
        """
        ticket = Ticket(
            attempt, attempt.request.timeline.received_at, asyncio.get_running_loop().create_future()
        )
        self._waiting.append(ticket)
        try:
            self.grant()
            if self._waiting and self._waits_since is None:
                self._waits_since = asyncio.get_running_loop().time()
            await ticket.granted
        finally:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            if not self._waiting:
                self._waits_since = None

    def grant(self) -> None:
        """Give places while there are any. Called on every change of what this depends on."""
        if self._waiting and (error := self._placing.hopeless()) is not None:
            for ticket in self._waiting:
                if not ticket.granted.done():
                    ticket.granted.set_exception(error)
            self._waiting.clear()
        while self._waiting and not self.waits_for_room:
            ticket = self._next()
            too_late = self._placing.too_late(ticket.attempt)
            if too_late is None and not self._placing.place(ticket.attempt):
                return
            self._waiting.remove(ticket)
            if too_late is not None:
                if not ticket.granted.done():
                    ticket.granted.set_exception(too_late)
                continue
            if not ticket.granted.done():
                ticket.granted.set_result(None)
            if ticket.attempt.request.num_refusals and self._has_room_out():
                self._asking = ticket.attempt
            self._note_grant()

    def _next(self) -> Ticket:
        now = self._clock()

        def rank(ticket: Ticket) -> Rank:
            return self._policy.rank(self._placing.uncached_tokens(ticket.attempt), now - ticket.arrival)

        return min(self._waiting, key=rank)

    def no_room(self, retry_s: float) -> None:
        """Decode memory is full: nobody leaves the queue until room is reported, or time has passed."""
        if self._no_room_timer is None:
            self._no_room_timer = asyncio.get_running_loop().call_later(retry_s, self.room)

    def answered(self, attempt: Attempt) -> None:
        """It has room, or it has none, or it has been given up. Idempotent."""
        if self._asking is attempt:
            self._asking = None
            self.grant()

    def room(self) -> None:
        if self._no_room_timer is not None:
            self._no_room_timer.cancel()
            self._no_room_timer = None
        self.grant()

    def close(self) -> None:
        if self._no_room_timer is not None:
            self._no_room_timer.cancel()

    def _note_grant(self) -> None:
        """Time in which nobody waited says nothing of how fast the queue moves."""
        now = asyncio.get_running_loop().time()
        if self._waits_since is not None:
            gap = min(30.0, now - self._waits_since)
            self._grant_interval_s += 0.1 * (gap - self._grant_interval_s)
        self._waits_since = now if self._waiting else None
