"""Service level objectives, and the share of requests that meet all of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from pdserve.bench.errors import BenchError
from pdserve.bench.serve.records import RequestRecord


@dataclass(frozen=True, slots=True)
class Slo:
    """Milliseconds at most; None: no matter."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    tbt_ms: float | None = None
    e2el_ms: float | None = None

    def is_met(self, record: RequestRecord) -> bool:
        """A request that failed meets none; an answer of one token has no TPOT and no TBT to miss."""
        limits = (
            (self.ttft_ms, record.ttft_s),
            (self.tpot_ms, record.tpot_s),
            (self.tbt_ms, record.tbt_s),
            (self.e2el_ms, record.e2el_s),
        )
        return record.is_ok and all(
            limit_ms is None or value_s is None or value_s * 1e3 <= limit_ms for limit_ms, value_s in limits
        )

    def __str__(self) -> str:
        limits = ((field.name, getattr(self, field.name)) for field in fields(self))
        return " ".join(f"{name.removesuffix('_ms')}:{ms:g}" for name, ms in limits if ms is not None)


@dataclass(frozen=True, slots=True)
class Goodput:
    num_requests: int
    num_met: int
    duration_s: float

    @property
    def attainment(self) -> float:
        """The share of requests that met every objective."""
        return self.num_met / self.num_requests if self.num_requests else 0.0

    @property
    def request_rate(self) -> float:
        """Requests that met every objective, a second."""
        return self.num_met / self.duration_s if self.duration_s else 0.0


def goodput(records: Sequence[RequestRecord], slo: Slo) -> Goodput:
    begin_s = min((record.scheduled_s for record in records), default=0.0)
    end_s = max((record.ended_s for record in records), default=0.0)
    return Goodput(len(records), sum(slo.is_met(record) for record in records), end_s - begin_s)


def parse_slo(parts: Iterable[str]) -> Slo:
    """`ttft:2000 tpot:40`, in as many strings as wanted, spaces and commas between. Raises BenchError."""
    names = [field.name.removesuffix("_ms") for field in fields(Slo)]
    limits: dict[str, float] = {}
    for part in " ".join(parts).replace(",", " ").split():
        name, _, text = part.partition(":")
        try:
            value = float(text)
        except ValueError:
            raise BenchError(f"{part}: write a limit as NAME:MILLISECONDS, like ttft:2000") from None
        if name not in names:
            raise BenchError(f"{part}: limits are set on {', '.join(names)}")
        if not 0 < value < math.inf:
            raise BenchError(f"{part}: a limit is above 0, and no infinity")
        limits[f"{name}_ms"] = value
    if not limits:
        raise BenchError("no limit is set: write some, like ttft:2000 tpot:40")
    return Slo(**limits)
