"""What workers do in a second: the differences of their counters between snapshots of the last seconds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from pdserve.client import Cluster, Worker

_WINDOW_S = 5.0


@dataclass(frozen=True, slots=True)
class WorkerRates:
    """Per second."""

    prefilled: float
    decoded: float
    kv_sent: float
    kv_received: float
    # Means over the hand-overs of the window, in ms: first token → all KV is here, and → first step. None
    # where nothing was handed over.
    handover_ms: float | None
    decode_start_ms: float | None


@dataclass(frozen=True, slots=True)
class _Count:
    at: float
    prefilled: int
    decoded: int
    kv_sent: int
    kv_received: int
    num_started: int
    handover_ms: float
    decode_start_ms: float


class Rates:
    """By process: one that takes another's place begins at nothing."""

    def __init__(self) -> None:
        self._counts: dict[str, deque[_Count]] = {}

    def add(self, cluster: Cluster, at: float) -> None:
        """`at`: monotonic seconds."""
        counts: dict[str, deque[_Count]] = {}
        for worker in (worker for pool in cluster.pools for worker in pool.workers):
            kept = self._counts.get(worker.instance_id, deque())
            kept.append(_count(worker, at))
            while len(kept) > 2 and at - kept[1].at >= _WINDOW_S:
                kept.popleft()
            counts[worker.instance_id] = kept
        self._counts = counts

    def of(self, worker: Worker) -> WorkerRates | None:
        """None until there are two snapshots with it."""
        kept = self._counts.get(worker.instance_id)
        if kept is None or kept[-1].at <= kept[0].at:
            return None
        first, last = kept[0], kept[-1]
        seconds, num_started = last.at - first.at, last.num_started - first.num_started
        return WorkerRates(
            prefilled=(last.prefilled - first.prefilled) / seconds,
            decoded=(last.decoded - first.decoded) / seconds,
            kv_sent=(last.kv_sent - first.kv_sent) / seconds,
            kv_received=(last.kv_received - first.kv_received) / seconds,
            handover_ms=(last.handover_ms - first.handover_ms) / num_started if num_started else None,
            decode_start_ms=(
                (last.decode_start_ms - first.decode_start_ms) / num_started if num_started else None
            ),
        )


def _count(worker: Worker, at: float) -> _Count:
    counters, transfers = worker.counters, worker.transfers
    return _Count(
        at=at,
        prefilled=counters.tokens_prefilled,
        decoded=counters.tokens_decoded,
        kv_sent=counters.kv_bytes_sent,
        kv_received=counters.kv_bytes_received,
        num_started=sum(each.num_started for each in transfers),
        handover_ms=sum(each.handover_ms for each in transfers),
        decode_start_ms=sum(each.decode_start_ms for each in transfers),
    )
