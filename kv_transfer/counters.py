"""What went by each transport, as plain sums."""

from __future__ import annotations

import threading
from dataclasses import astuple, dataclass


@dataclass(frozen=True, slots=True)
class TransferCounts:
    """Sums over hand-overs that arrived whole. Units as in `TransferCounters` of the proto."""

    num_transfers: int = 0
    num_bytes: int = 0
    transfer_ms: float = 0.0
    hidden_bytes: int = 0
    num_started: int = 0
    handover_ms: float = 0.0
    decode_start_ms: float = 0.0

    def plus(self, other: TransferCounts) -> TransferCounts:
        return TransferCounts(*map(sum, zip(astuple(self), astuple(other), strict=True)))


class TransportCounters:
    """By transport. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, TransferCounts] = {}

    def add(self, transport: str, more: TransferCounts) -> None:
        with self._lock:
            self._counts[transport] = self._counts.get(transport, TransferCounts()).plus(more)

    def copy(self) -> dict[str, TransferCounts]:
        with self._lock:
            return dict(self._counts)
