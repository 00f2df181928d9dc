"""Frames on their way to one D that are not answered yet: what bounds P's memory, and shows a silent peer."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from engine.errors import IntegrityError
from kv_transfer.frame import TransferKey
from kv_transfer.transfer import Transfer


@dataclass(frozen=True, slots=True)
class _Unanswered:
    transfer: Transfer
    sent_at: float
    payload_bytes: int


class Window:
    """Not thread-safe: its owner's lock guards it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        # Oldest first.
        self._frames: OrderedDict[tuple[TransferKey, int], _Unanswered] = OrderedDict()

    def room_bytes(self, at_least: int) -> int:
        """An empty window has room for one frame of any size."""
        room = self._max_bytes - self._num_bytes
        return max(room, at_least) if self._num_bytes == 0 else room

    def add(self, transfer: Transfer, seq: int, payload_bytes: int, now: float) -> None:
        self._frames[transfer.key, seq] = _Unanswered(transfer, now, payload_bytes)
        self._num_bytes += payload_bytes
        transfer.num_unanswered += 1

    def answered(self, key: TransferKey, seq: int) -> Transfer | None:
        """None: a duplicate's answer, or one for a transfer that has ended here."""
        frame = self._remove((key, seq))
        if frame is None:
            return None
        frame.transfer.bytes_acknowledged += frame.payload_bytes
        return frame.transfer

    def forget(self, transfer: Transfer) -> None:
        if transfer.num_unanswered > 0:
            for name in [name for name in self._frames if name[0] == transfer.key]:
                self._remove(name)

    def _remove(self, name: tuple[TransferKey, int]) -> _Unanswered | None:
        frame = self._frames.pop(name, None)
        if frame is not None:
            self._num_bytes -= frame.payload_bytes
            frame.transfer.num_unanswered -= 1
        return frame

    def oldest_sent_at(self) -> float | None:
        oldest = next(iter(self._frames.values()), None)
        return oldest.sent_at if oldest is not None else None

    def check_integrity(self) -> None:
        if self._num_bytes != sum(f.payload_bytes for f in self._frames.values()):
            raise IntegrityError("the window's bytes do not add up")
        if any(f.transfer.is_ended for f in self._frames.values()):
            raise IntegrityError("frames wait for an answer that nobody wants")
