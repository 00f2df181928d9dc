"""How much a decode worker checks of the KV that it gets, and the hashes by which it does."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

import xxhash

Buffer = bytes | bytearray | memoryview


class Verify(IntEnum):
    """In order of strength: a decode worker refuses a hand-over that is checked less than it demands.

    Where nobody has set it, it is what is usual on the transport: CHECKSUM, and OFF where no wire that could
    damage bytes is passed, or where hashing them would bring them from a GPU to the host for nothing else.
    """

    OFF = 0
    # Each frame's hash on arrival, and at the end the hash of those hashes.
    CHECKSUM = 1
    # Besides, the same hash over what lies in the blocks once they are written.
    FULL = 2


class Digest:
    """A hash over the frames' checksums, in order: no second pass over the bytes."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()

    def add(self, frame_checksum: int) -> None:
        self._hash.update(frame_checksum.to_bytes(8, "little"))

    def value(self) -> int:
        return int(self._hash.intdigest())


def checksum(payload: Iterable[Buffer]) -> int:
    """xxh3 (64 bits) over the pieces as if they were one."""
    hasher = xxhash.xxh3_64()
    for piece in payload:
        hasher.update(piece)
    return int(hasher.intdigest())
