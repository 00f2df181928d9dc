"""Which streams of a server keep their places: each has a thread there, and places are few. One whose peer
says nothing for long, or reads no answers, is ended; a sender that is well makes a new one when it needs it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StreamLimits:
    max_streams: int = 128
    # From a stream's beginning to its first message: a sender makes one only when it has something to say.
    first_s: float = 5.0
    # Between messages. A transfer that lives is renewed far more often than this, and than `crowded_s`.
    idle_s: float = 600.0
    # Where every place is taken, the one that was silent for longest leaves, if it was so for so long.
    crowded_s: float = 30.0
    # For an answer that the peer does not read.
    unread_s: float = 10.0
    # How often streams are looked at.
    tick_s: float = 1.0


class WatchedStream:
    """The messages of one stream."""

    def __init__(
        self, messages: Iterator[bytes], peer: str, end: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        self.peer = peer
        self.end = end
        self._messages = messages
        self._clock = clock
        self.has_spoken = False
        self.heard_at = clock()
        # When the answer left that the peer has not read yet.
        self.answered_at: float | None = None

    def __iter__(self) -> Iterator[bytes]:
        for message in self._messages:
            self.has_spoken, self.heard_at = True, self._clock()
            yield message

    def pass_on(self, answers: Iterator[bytes]) -> Iterator[bytes]:
        """Whoever takes one comes back when it has left."""
        for answer in answers:
            self.answered_at = self._clock()
            yield answer
            self.answered_at = None

    def fault(self, limits: StreamLimits, now: float) -> str | None:
        """Why it is to end."""
        silent_s = now - self.heard_at
        if not self.has_spoken and silent_s >= limits.first_s:
            return f"nothing was said in the first {limits.first_s:g} s"
        if silent_s >= limits.idle_s:
            return f"nothing was said for {limits.idle_s:g} s"
        answered_at = self.answered_at
        if answered_at is not None and now - answered_at >= limits.unread_s:
            return f"no answer was read for {limits.unread_s:g} s"
        return None


class StreamWatch:
    """Thread-safe; a thread of its own looks after the streams."""

    def __init__(self, limits: StreamLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._streams: set[WatchedStream] = set()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    @contextmanager
    def watching(
        self, messages: Iterator[bytes], peer: str, end: Callable[[], None]
    ) -> Iterator[WatchedStream]:
        """`end` must not block; it may be called more than once, and when the stream has ended already."""
        stream = WatchedStream(messages, peer, end, self._clock)
        with self._lock:
            self._streams.add(stream)
        try:
            yield stream
        finally:
            with self._lock:
                self._streams.discard(stream)

    def look(self) -> None:
        """Ends those that are to end."""
        now = self._clock()
        with self._lock:
            streams = list(self._streams)
        faults = [(stream, stream.fault(self._limits, now)) for stream in streams]
        ended = [(stream, reason) for stream, reason in faults if reason is not None]
        for stream, reason in ended or self._crowded(streams, now):
            log.warning("the KV stream of %s is ended: %s", stream.peer, reason)
            stream.end()

    def _crowded(self, streams: list[WatchedStream], now: float) -> list[tuple[WatchedStream, str]]:
        if len(streams) < self._limits.max_streams:
            return []
        most_silent = min(streams, key=lambda each: each.heard_at)
        if now - most_silent.heard_at < self._limits.crowded_s:
            return []
        return [(most_silent, f"all {len(streams)} places are taken, and it was silent for longest")]

    def _run(self) -> None:
        while not self._stopping.wait(self._limits.tick_s):
            self.look()
