"""What pooled ITL percentiles hide: how long streams stand still."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdserve.bench.serve.records import RequestRecord


@dataclass(frozen=True, slots=True)
class Stalls:
    stalled_share: float  # of the streams' time, what lies in gaps longer than the limit
    longest_ms: float
    stream_s: float  # the streams' time, first token to last, added up


def stalls(
    records: Sequence[RequestRecord], limit_ms: float = 100.0, between_s: tuple[float, float] | None = None
) -> Stalls:
    """`between_s`: only gaps that end in there (seconds since the run began)."""
    gaps = [gap for record in records if record.is_ok for gap in _gaps(record, between_s)]
    total_s = sum(gaps)
    stalled_s = sum(gap for gap in gaps if gap * 1e3 > limit_ms)
    return Stalls(stalled_s / total_s if total_s else 0.0, max(gaps, default=0.0) * 1e3, total_s)


def _gaps(record: RequestRecord, between_s: tuple[float, float] | None) -> Iterable[float]:
    if between_s is None:
        return record.gaps_s
    ends = zip(record.gaps_s, record.arrivals_s[1:], strict=True)
    return [gap for gap, end_s in ends if between_s[0] <= end_s < between_s[1]]
