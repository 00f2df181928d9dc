"""How long a sequence was nobody's: between its first token on P and its first step on D."""

from __future__ import annotations

from dataclasses import dataclass

from engine.request import StepResult
from kv_transfer.counters import TransferCounts, TransportCounters
from kv_transfer.reservation import Reservation

_NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True)
class HandOver:
    """Milliseconds from P's drawing of the first token. The clocks are those of both nodes: where they
    differ, the figures are wrong by as much, but never below zero."""

    ready_ms: float
    first_step_ms: float


class HandOvers:
    """D's: of sequences whose KV is here and whose first step has not run. On the engine's thread."""

    def __init__(self, counters: TransportCounters) -> None:
        self._starting: dict[str, Reservation] = {}
        self._counters = counters

    def joined(self, sequence_id: str, reservation: Reservation) -> None:
        self._starting[sequence_id] = reservation

    def left(self, sequence_id: str) -> None:
        """It ended without a step. Idempotent."""
        self._starting.pop(sequence_id, None)

    def stepped(self, result: StepResult, ended_at_unix_ns: int) -> dict[str, HandOver]:
        """Of those whose first step this was."""
        if not self._starting:
            return {}
        began_at = ended_at_unix_ns - int(result.step_ms * _NS_PER_MS)
        started: dict[str, HandOver] = {}
        for output in result.outputs:
            reservation = self._starting.pop(output.sequence_id, None)
            if reservation is not None:
                started[output.sequence_id] = self._note(reservation, began_at)
        return started

    def _note(self, reservation: Reservation, began_at_unix_ns: int) -> HandOver:
        sampled_at = reservation.sampled_at_unix_ns
        handover = HandOver(
            max(0, reservation.ready_at_unix_ns - sampled_at) / _NS_PER_MS,
            max(0, began_at_unix_ns - sampled_at) / _NS_PER_MS,
        )
        counts = TransferCounts(
            num_started=1, handover_ms=handover.ready_ms, decode_start_ms=handover.first_step_ms
        )
        self._counters.add(reservation.transport, counts)
        return handover
