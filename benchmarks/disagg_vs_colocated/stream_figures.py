"""What streams felt, of all segments of one kind together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.disagg_vs_colocated.interference import Segment
from benchmarks.disagg_vs_colocated.settings import STALL_MS
from pdserve.bench.serve.records import RequestRecord


@dataclass(frozen=True, slots=True)
class StreamFigures:
    p50_ms: float
    p99_ms: float
    longest_ms: float
    stalled_share: float  # of the streams' time, in gaps over STALL_MS
    tok_s: float  # of all streams together, while they are written
    ttft_p50_ms: float | None  # of the streams' own answers that were asked for in this part


def quiet_figures(segments: Sequence[Segment], num_streams: int) -> StreamFigures | None:
    """None: nothing was measured."""
    return _figures([(each.streams, each.quiet_s) for each in segments], num_streams)


def loaded_figures(segments: Sequence[Segment], num_streams: int) -> StreamFigures | None:
    return _figures([(each.streams, each.loaded_s) for each in segments], num_streams)


def long_ttfts_ms(records: Iterable[RequestRecord]) -> list[float]:
    return [1e3 * record.ttft_s for record in records if record.ttft_s is not None]


def _figures(
    spans: Sequence[tuple[Sequence[RequestRecord], tuple[float, float]]], num_streams: int
) -> StreamFigures | None:
    gaps = [gap for records, span in spans for record in records for gap in gaps_within(record, span)]
    if not gaps:
        return None
    ms = np.array(gaps) * 1e3
    ttfts = [
        each
        for records, span in spans
        for each in long_ttfts_ms(record for record in records if span[0] <= record.scheduled_s < span[1])
    ]
    p50, p99 = np.percentile(ms, [50, 99]).tolist()
    return StreamFigures(
        p50_ms=p50,
        p99_ms=p99,
        longest_ms=float(ms.max()),
        stalled_share=float(ms[ms > STALL_MS].sum() / ms.sum()),
        tok_s=num_streams * len(gaps) / sum(gaps),
        ttft_p50_ms=float(np.median(ttfts)) if ttfts else None,
    )


def gaps_within(record: RequestRecord, span: tuple[float, float]) -> list[float]:
    """Those that end in there."""
    ends = zip(record.gaps_s, record.arrivals_s[1:], strict=True)
    return [gap for gap, end_s in ends if span[0] <= end_s < span[1]]
