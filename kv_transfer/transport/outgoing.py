"""What one P says to D on a stream of gRPC, whose own thread takes it from here."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from pdserve.v1.errors import Unavailable


class Outgoing:
    """One frame at a time from the sending thread to gRPC's: `put` waits until the one before was taken."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._wake = threading.Condition()
        self._frame: bytes | None = None
        self._is_closed = False

    def put(self, frame: bytes) -> None:
        with self._wake:
            if not self._wake.wait_for(lambda: self._frame is None or self._is_closed, self._timeout_s):
                raise Unavailable(f"the peer took nothing for {self._timeout_s} s", reason="KV_SEND_TIMEOUT")
            if self._is_closed:
                raise Unavailable("the KV stream is closed", reason="KV_STREAM_BROKEN")
            self._frame = frame
            self._wake.notify_all()

    def close(self) -> bool:
        """Whether it was open until now."""
        with self._wake:
            was_open, self._is_closed = not self._is_closed, True
            self._wake.notify_all()
            return was_open

    def __iter__(self) -> Iterator[bytes]:
        while (frame := self._take()) is not None:
            yield frame

    def _take(self) -> bytes | None:
        with self._wake:
            self._wake.wait_for(lambda: self._frame is not None or self._is_closed)
            frame, self._frame = self._frame, None
            self._wake.notify_all()
            return frame
