"""What D says to one P, in fewer messages than there are answers: each costs both ends some wake-ups, while
frames are on their way."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import dataclass

from kv_transfer.codec import FrameError

# Behind a frame of this length the sender has most likely another one.
_LONG_BYTES = 1024 * 1024
# How long such an answer waits for the next, and how many leave together: fewer than a window has frames.
_PATIENCE_S = 0.004
_MAX_TOGETHER = 4
# A sender has a window's frames on their way, and reads all that comes: so many unread, it reads nothing.
MAX_UNREAD = 1024


@dataclass(frozen=True, slots=True)
class _Answer:
    raw: bytes
    can_wait: bool


@dataclass(frozen=True, slots=True)
class _End:
    error: Exception | None


def require_read(num_unread: int) -> None:
    """Raises FrameError."""
    if num_unread >= MAX_UNREAD:
        raise FrameError(f"{num_unread} answers were not read")


class Answers:
    """One thread puts them in, another sends what the iterator gives: answers one behind the other, as
    `codec.decode_answers` takes them. An answer to a short frame leaves at once."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[_Answer | _End] = queue.SimpleQueue()

    def put(self, answer: bytes, frame_bytes: int) -> None:
        """Raises FrameError where the peer does not read."""
        require_read(self._waiting.qsize())
        self._waiting.put(_Answer(answer, can_wait=frame_bytes >= _LONG_BYTES))

    def close(self, error: Exception | None = None) -> None:
        """There are no more. The iterator gives what is left, and raises `error`."""
        self._waiting.put(_End(error))

    def __iter__(self) -> Iterator[bytes]:
        item = self._waiting.get()
        while isinstance(item, _Answer):
            together = [item.raw]
            following: _Answer | _End | None = self._next_within_patience() if item.can_wait else None
            while isinstance(following, _Answer):
                together.append(following.raw)
                is_full = len(together) == _MAX_TOGETHER or not following.can_wait
                following = None if is_full else self._next_within_patience()
            yield b"".join(together)
            item = self._waiting.get() if following is None else following
        if item.error is not None:
            raise item.error

    def _next_within_patience(self) -> _Answer | _End | None:
        try:
            return self._waiting.get(timeout=_PATIENCE_S)
        except queue.Empty:
            return None
