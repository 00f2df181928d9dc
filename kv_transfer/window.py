"""Frames on their way to one D that are not answered yet: what bounds P's memory, and shows a silent peer."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from itertools import takewhile

from engine.errors import IntegrityError
from kv_transfer.frame import TransferKey
from kv_transfer.transfer import Transfer


@dataclass(frozen=True, slots=True)
class _Unanswered:
    transfer: Transfer
    sent_at: float
    payload_bytes: int


class Window:
    """Frames of transfers that have ended stay until they are answered as well: D still has to take them.

    Not thread-safe: its owner's lock guards it.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._num_bytes = 0
        self._answered_at = 0.0
        # Oldest first.
        self._frames: OrderedDict[tuple[TransferKey, int], _Unanswered] = OrderedDict()

    def __contains__(self, key: TransferKey) -> bool:
        return any(name[0] == key for name in self._frames)

    def room_bytes(self, at_least: int) -> int:
        """An empty window has room for one frame of any size."""
        room = self.max_bytes - self._num_bytes
        return max(room, at_least) if self._num_bytes == 0 else room

    def add(self, transfer: Transfer, seq: int, payload_bytes: int, now: float) -> None:
        self._frames[transfer.key, seq] = _Unanswered(transfer, now, payload_bytes)
        self._num_bytes += payload_bytes
        transfer.num_unanswered += 1
        transfer.num_payloads_unanswered += payload_bytes > 0

    def answered(self, key: TransferKey, seq: int, now: float) -> Transfer | None:
        """Whose frame it was; None for the answer to a duplicate. Answers come in order: what the transfer
        sent before this frame will get none any more."""
        frame = self._frames.get((key, seq))
        if frame is None:
            return None
        self._answered_at = now
        older = takewhile(lambda name: name != (key, seq), self._frames)
        for name in [name for name in older if name[0] == key]:
            self._remove(name)
        self._remove((key, seq))
        frame.transfer.bytes_acknowledged += frame.payload_bytes
        return frame.transfer

    def _remove(self, name: tuple[TransferKey, int]) -> None:
        frame = self._frames.pop(name)
        self._num_bytes -= frame.payload_bytes
        frame.transfer.num_unanswered -= 1
        frame.transfer.num_payloads_unanswered -= frame.payload_bytes > 0

    def silent_since(self) -> float | None:
        """From when on the peer has owed answers and given none: on a slow way each may be late, and
        they come. None: it owes nothing."""
        oldest = next(iter(self._frames.values()), None)
        return None if oldest is None else max(oldest.sent_at, self._answered_at)

    def check_integrity(self) -> None:
        if self._num_bytes != sum(f.payload_bytes for f in self._frames.values()):
            raise IntegrityError("the window's bytes do not add up")
        for transfer, number in Counter(f.transfer for f in self._frames.values()).items():
            if transfer.num_unanswered != number:
                raise IntegrityError(
                    f"{transfer.key} waits for {transfer.num_unanswered} answers of {number}"
                )
