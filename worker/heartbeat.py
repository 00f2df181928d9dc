"""A thread that does nothing but look after the worker's others, and what it and the engine show of life.

It is what tells a process that runs from one that does not, and it says in the log where a thread is stuck:
whoever kills the worker later takes that along.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback

from engine.progress import Progress
from pdserve.v1 import cluster_pb2

log = logging.getLogger(__name__)

_BEAT_EVERY_S = 0.5
# As long as the router's patience.
STUCK_AFTER_S = 5.0


class Heartbeat:
    """`start` on the asyncio loop that serves, `stop` from any thread. Once only."""

    def __init__(self, worker_id: str, progress: Progress, stuck_after_s: float = STUCK_AFTER_S) -> None:
        self._worker_id = worker_id
        self._progress = progress
        self._stuck_after_s = stuck_after_s
        self._beat_at = time.monotonic()
        self._loop_heard_at = self._beat_at
        self._count = 0
        self._moved_at = self._beat_at
        # What was told to be stuck, and has not gone on since.
        self._told: set[str] = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._beat_at = self._loop_heard_at = self._moved_at = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def vitals(self) -> cluster_pb2.Vitals:
        reading = self._progress.read()
        # Read before the clock: a beat in between would lie behind it.
        beat_at = self._beat_at
        age_s = time.monotonic() - beat_at if self._thread.is_alive() else 0.0
        return cluster_pb2.Vitals(
            progress=reading.count,
            is_working=reading.is_working,
            is_compiling=reading.is_compiling,
            step_ms=reading.step_ms,
            heartbeat_age_ms=round(age_s * 1000),
        )

    def _run(self) -> None:
        while not self._stopped.wait(_BEAT_EVERY_S):
            now = time.monotonic()
            # Where this thread did not run, the others may not have run either.
            lost_s = max(0.0, now - self._beat_at - 2 * _BEAT_EVERY_S)
            self._loop_heard_at += lost_s
            self._moved_at += lost_s
            self._beat_at = now
            self._ask_loop()
            self._look_at_engine(now)
            self._tell("the loop that serves", now - self._loop_heard_at)
            self._tell("the engine", now - self._moved_at)

    def _ask_loop(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._on_loop)
        except RuntimeError:
            self._stopped.set()  # the loop is closed: nobody is served any more

    def _on_loop(self) -> None:
        self._loop_heard_at = time.monotonic()

    def _look_at_engine(self, now: float) -> None:
        reading = self._progress.read()
        if reading.count != self._count or not reading.is_working or reading.is_compiling:
            self._count, self._moved_at = reading.count, now

    def _tell(self, what: str, still_s: float) -> None:
        if still_s < self._stuck_after_s:
            self._told.discard(what)
        elif what not in self._told:
            self._told.add(what)
            told = "worker=%s %s has not gone on for %.0f s. All threads:\n%s"
            log.warning(told, self._worker_id, what, still_s, _stacks())


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"{names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )
