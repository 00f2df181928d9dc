"""Records made by hand."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.bench.serve.records import Failure, RequestRecord


def record(
    arrivals_s: Sequence[float] = (),
    *,
    at_s: float = 0.0,
    lag_s: float = 0.0,
    num_tokens: int | None = None,
    failure: Failure | None = None,
) -> RequestRecord:
    return RequestRecord(
        index=0,
        scheduled_s=at_s,
        sent_s=at_s + lag_s,
        ended_s=arrivals_s[-1] if arrivals_s else at_s,
        arrivals_s=tuple(arrivals_s),
        num_prompt_tokens=10,
        num_cached_tokens=None,
        num_tokens=len(arrivals_s) if num_tokens is None else num_tokens,
        failure=failure,
        timings=None,
    )
