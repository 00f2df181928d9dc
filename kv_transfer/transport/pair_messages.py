"""What the two ends of a pair say to each other over gRPC: a byte for its kind, then its body.

P → D   PAIR     how P would pair (`Hello`)
D → P   MEET     where the store is, and a nonce, which P then sends by the pair itself (`Meeting`)
D → P   PAIRED   the nonce came
both    FRAME    a frame, or the answer to one; Blocks come without their payload: that means "ready"
D → P   POSTED   the receive for the oldest Blocks frame that had none, and how it is cut: P sends the payload
D → P   BROKEN   the pair is given up, or never was; why
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from kv_transfer.codec import FrameError

METHOD = "PushCollective"
# Receives that D has posted at a time, and so what P is sending.
NUM_POSTED = 3
NONCE_BYTES = 16
_HELLO = struct.Struct("<Q")
_LENGTH = np.dtype("<i4")
_MEETING = struct.Struct(f"<H{NONCE_BYTES}s")


class Kind(IntEnum):
    FRAME = 0
    PAIR = 1
    MEET = 2
    PAIRED = 3
    POSTED = 4
    BROKEN = 5


@dataclass(frozen=True, slots=True)
class Hello:
    """Both ends must say the same."""

    backend: str  # "gloo" or "nccl"
    layer_bytes: int

    def pack(self) -> bytes:
        return _HELLO.pack(self.layer_bytes) + self.backend.encode()


@dataclass(frozen=True, slots=True)
class Meeting:
    port: int
    nonce: bytes

    def pack(self) -> bytes:
        return _MEETING.pack(self.port, self.nonce)


def message(kind: Kind, body: bytes = b"") -> bytes:
    return bytes([kind]) + body


def parse(raw: bytes) -> tuple[Kind, bytes]:
    """Raises FrameError."""
    if not raw or raw[0] not in Kind._value2member_map_:
        raise FrameError("no message between the ends of a pair")
    return Kind(raw[0]), raw[1:]


def parse_hello(body: bytes) -> Hello:
    if len(body) < _HELLO.size:
        raise FrameError("no hello")
    (layer_bytes,) = _HELLO.unpack(body[: _HELLO.size])
    return Hello(body[_HELLO.size :].decode(errors="replace"), layer_bytes)


def parse_meeting(body: bytes) -> Meeting:
    if len(body) != _MEETING.size:
        raise FrameError("no meeting place")
    return Meeting(*_MEETING.unpack(body))


def pack_posted(neighbours: Sequence[int]) -> bytes:
    """Empty: all of the frame is one piece."""
    return np.array(neighbours, _LENGTH).tobytes()


def parse_posted(body: bytes) -> list[int]:
    if len(body) % _LENGTH.itemsize:
        raise FrameError("no lengths of pieces")
    lengths: list[int] = np.frombuffer(body, _LENGTH).tolist()
    return lengths
