"""The report of a run: latencies of the requests that ended well, rates, failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pdserve.bench.serve.records import RequestRecord


@dataclass(frozen=True, slots=True)
class Spread:
    """Milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class FailureCount:
    code: str
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Summary:
    """A latency is None where no request has it."""

    num_requests: int
    num_ok: int
    failures: tuple[FailureCount, ...]  # most frequent first
    duration_s: float  # from the first scheduled time to the last end
    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens: int
    num_arrivals: int  # fewer than tokens where several come at once
    max_concurrency: int
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None  # over all gaps of all requests
    tbt_ms: Spread | None
    e2el_ms: Spread | None
    lag_ms: Spread | None  # how late the client sent, failed requests too

    @property
    def num_failed(self) -> int:
        return self.num_requests - self.num_ok

    @property
    def request_rate(self) -> float:
        """Requests that ended well, a second."""
        return self.num_ok / self.duration_s if self.duration_s else 0.0

    @property
    def token_rate(self) -> float:
        """Tokens of their answers, a second."""
        return self.num_tokens / self.duration_s if self.duration_s else 0.0

    @property
    def total_token_rate(self) -> float:
        """With their prompts'."""
        num_tokens = self.num_tokens + self.num_prompt_tokens
        return num_tokens / self.duration_s if self.duration_s else 0.0


def summarize(records: Sequence[RequestRecord]) -> Summary:
    """Token counts and latencies are of the requests that ended well."""
    done = [record for record in records if record.is_ok]
    begin_s = min((record.scheduled_s for record in records), default=0.0)
    end_s = max((record.ended_s for record in records), default=0.0)
    return Summary(
        num_requests=len(records),
        num_ok=len(done),
        failures=_failures(records),
        duration_s=end_s - begin_s,
        num_prompt_tokens=sum(record.num_prompt_tokens for record in done),
        num_cached_tokens=sum(record.num_cached_tokens or 0 for record in done),
        num_tokens=sum(record.num_tokens for record in done),
        num_arrivals=sum(len(record.arrivals_s) for record in done),
        max_concurrency=_max_concurrency(records),
        ttft_ms=spread_ms(record.ttft_s for record in done),
        tpot_ms=spread_ms(record.tpot_s for record in done),
        itl_ms=spread_ms(gap for record in done for gap in record.gaps_s),
        tbt_ms=spread_ms(record.tbt_s for record in done),
        e2el_ms=spread_ms(record.e2el_s for record in done),
        lag_ms=spread_ms(record.lag_s for record in records),
    )


def spread_ms(seconds: Iterable[float | None]) -> Spread | None:
    """Of those that are there; None if none is. Percentiles are interpolated."""
    values = np.array([value for value in seconds if value is not None]) * 1e3
    if not len(values):
        return None
    p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
    return Spread(float(values.mean()), p50, p90, p99, float(values.max()))


def _failures(records: Iterable[RequestRecord]) -> tuple[FailureCount, ...]:
    failures = [record.failure for record in records if record.failure is not None]
    examples = {failure.code: failure.message for failure in reversed(failures)}  # the first of each
    counts = Counter(failure.code for failure in failures)
    return tuple(FailureCount(code, count, examples[code]) for code, count in counts.most_common())


def _max_concurrency(records: Iterable[RequestRecord]) -> int:
    """Most requests that were outstanding at once."""
    # At one moment, ends come before begins.
    moments = sorted(
        (at_s, step) for each in records for at_s, step in ((each.sent_s, 1), (each.ended_s, -1))
    )
    levels = np.cumsum([step for _, step in moments])
    return int(levels.max()) if len(levels) else 0
