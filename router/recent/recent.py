"""What this router's clients have felt lately: the last requests one by one, and the last seconds in figures.

Runs beside every token, so it only counts; whoever looks does the work.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pdserve.v1 import cluster_pb2
from router.events import LifetimeEvent, Moment
from router.outputs import Delta, Finished, Output, Started
from router.recent.timeline import Mark, Timeline
from router.recent.window import WINDOW_S, RecentQuantiles, RecentRate
from router.request import Request

# Besides those in flight.
MAX_ENDED = 64


class Recent:
    def __init__(self) -> None:
        self.ttft_ms, self.itl_ms = RecentQuantiles(), RecentQuantiles()
        self.prompt_tokens, self.output_tokens, self.finished = RecentRate(), RecentRate(), RecentRate()
        self._running: dict[str, Timeline] = {}
        self._ended: deque[Timeline] = deque(maxlen=MAX_ENDED)
        self._version = 0
        self._watches: set[asyncio.Event] = set()

    @contextmanager
    def follow(self, requests: Sequence[Request]) -> Iterator[Followed]:
        """Around the life of all sequences of one request. One that never began is forgotten."""
        timelines: dict[int, Timeline] = {}
        for request in requests:
            plan, received_at = request.plan, request.timeline.received_at
            timeline = Timeline(
                id=plan.transfer_id,
                request_id=plan.request_id,
                index=plan.index,
                prompt_tokens=len(plan.prompt_token_ids),
                received_at=received_at,
                received_time=time.time() - (time.monotonic() - received_at),
            )
            timelines[plan.index] = self._running[timeline.id] = timeline
        try:
            yield Followed(self, timelines)
        finally:
            for timeline in timelines.values():
                self._running.pop(timeline.id, None)

    def note_event(self, event: LifetimeEvent) -> None:
        timeline = self._running.get(event.transfer_id)
        if timeline is None:
            return
        if timeline.marks and timeline.marks[-1].moment is event.moment is Moment.QUEUED:
            return  # there was no room, and it waits on: that may happen many times a second
        timeline.marks.append(Mark(event.moment, event.worker, timeline.since_ms(event.at)))
        if event.moment is Moment.FINISHED:
            timeline.outcome = event.outcome
            self._ended.append(self._running.pop(timeline.id))
        self.changed(timeline)

    def changed(self, timeline: Timeline) -> None:
        self._version += 1
        timeline.version = self._version
        for watch in self._watches:
            watch.set()

    @contextmanager
    def watch(self) -> Iterator[asyncio.Event]:
        """Set at every change; the watcher clears it."""
        event = asyncio.Event()
        self._watches.add(event)
        try:
            yield event
        finally:
            self._watches.discard(event)

    def newest(self, count: int, request_id: str | None = None) -> list[Timeline]:
        """Of those that have begun, by arrival, newest first. However old, those of `request_id` too."""
        known = (*self._ended, *(each for each in self._running.values() if each.marks))
        by_age = sorted(known, key=lambda timeline: timeline.received_at, reverse=True)
        return [*by_age[:count], *(each for each in by_age[count:] if each.request_id == request_id)]

    def load(self, num_running: int, num_waiting: int) -> cluster_pb2.RouterLoad:
        return cluster_pb2.RouterLoad(
            num_running=num_running,
            num_waiting=num_waiting,
            window_ms=WINDOW_S * 1000,
            num_finished=self.finished.count,
            prompt_tokens_per_s=self.prompt_tokens.per_s,
            output_tokens_per_s=self.output_tokens.per_s,
            ttft_ms=self.ttft_ms.read(),
            itl_ms=self.itl_ms.read(),
        )


class Followed:
    """Of one request, all its sequences, by their indexes."""

    def __init__(self, recent: Recent, timelines: dict[int, Timeline]) -> None:
        self._recent = recent
        self._timelines = timelines
        self._last_ms: dict[int, float] = {}

    def note(self, output: Output) -> None:
        """As it goes out."""
        recent, timeline = self._recent, self._timelines[output.index]
        now_ms = timeline.since_ms(time.monotonic())
        if isinstance(output, Delta):
            self._note_delta(timeline, output, now_ms)
        elif isinstance(output, Started):
            recent.ttft_ms.add(now_ms)
            recent.prompt_tokens.add(output.prompt_tokens)
            timeline.cached_tokens = output.cached_tokens
        else:
            self._note_end(timeline, output)
        recent.changed(timeline)

    def _note_delta(self, timeline: Timeline, delta: Delta, now_ms: float) -> None:
        recent, count = self._recent, len(delta.piece.token_ids)
        last_ms = self._last_ms.get(delta.index)
        if last_ms is not None:
            recent.itl_ms.add(now_ms - last_ms)
        self._last_ms[delta.index] = now_ms
        recent.output_tokens.add(count)
        timeline.tokens.add(now_ms, count)

    def _note_end(self, timeline: Timeline, finished: Finished) -> None:
        self._recent.finished.add(1)
        timeline.timings = finished.timings
        timeline.num_resumes = finished.num_resumes
