"""Whole messages over a Unix stream socket: `u32 length (little endian) | bytes`. One without bytes is a
farewell: it says that nothing follows, and nothing goes on behind it."""

from __future__ import annotations

import socket
import struct

from kv_transfer.codec import MAX_HEADER_BYTES, PREFIX_BYTES, FrameError

_MAX_BYTES = MAX_HEADER_BYTES + PREFIX_BYTES
_LENGTH_BYTES = 4
_READ_BYTES = 64 * 1024
FAREWELL = b""


def framed(message: bytes) -> bytes:
    return len(message).to_bytes(_LENGTH_BYTES, "little") + message


class FrameSocket:
    """One thread sends at a time, and one receives. What fails raises OSError."""

    def __init__(self, connected: socket.socket, send_timeout_s: float) -> None:
        self._socket = connected
        self._received = bytearray()
        # Of the sending side alone: whoever receives may wait for as long as he likes.
        seconds = int(send_timeout_s)
        limit = struct.pack("ll", seconds, int((send_timeout_s - seconds) * 1e6))
        connected.settimeout(None)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: bytes) -> None:
        """Raises BlockingIOError where the peer takes nothing for the timeout."""
        self._socket.sendall(framed(message))

    def take(self) -> bytes | None:
        """A message that was read whole; None: `fill` first. Raises FrameError for one that is too long."""
        if len(self._received) < _LENGTH_BYTES:
            return None
        length = int.from_bytes(self._received[:_LENGTH_BYTES], "little")
        if length > _MAX_BYTES:
            raise FrameError(f"a message of {length} bytes; {_MAX_BYTES} are allowed")
        end = _LENGTH_BYTES + length
        if len(self._received) < end:
            return None
        message = bytes(self._received[_LENGTH_BYTES:end])
        del self._received[:end]
        return message

    def fill(self) -> bool:
        """Waits for more bytes. False: there will be none."""
        data = self._socket.recv(_READ_BYTES)
        self._received += data
        return bool(data)

    def receive(self) -> bytes | None:
        """Waits for a message. None: there will be none."""
        while (message := self.take()) is None:
            if not self.fill():
                return None
        return message

    def hang_up(self, both_ways: bool = False) -> None:
        """Nothing more is sent from here (nor read); ends a `send` (and a `fill`) that waits."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR if both_ways else socket.SHUT_WR)
        except OSError:
            pass  # the peer was faster

    def close(self) -> None:
        self._socket.close()
