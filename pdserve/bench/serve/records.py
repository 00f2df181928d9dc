"""What became of one request of a load test; every figure is derived from these."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from pdserve.client import Timings

# TBT is the mean of this share of a request's gaps, its longest (as Mooncake defines it, FAST'25).
TBT_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Failure:
    code: str  # a gRPC code, an HTTP code, or TIMEOUT, CONNECTION, BROKEN_STREAM, SEVERAL_ANSWERS, EMPTY
    message: str


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Times are seconds since the run began. Everything a user feels counts from the scheduled time."""

    index: int
    scheduled_s: float
    sent_s: float
    ended_s: float
    # When tokens came; usually one each time, more where the server sends several at once.
    arrivals_s: tuple[float, ...]
    num_prompt_tokens: int
    num_cached_tokens: int | None  # None: the server does not say
    num_tokens: int  # of the answer
    failure: Failure | None
    timings: Timings | None  # the server's own, where it tells

    @property
    def is_ok(self) -> bool:
        return self.failure is None

    @property
    def lag_s(self) -> float:
        return self.sent_s - self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        """None: no token came."""
        return self.arrivals_s[0] - self.scheduled_s if self.arrivals_s else None

    @property
    def e2el_s(self) -> float | None:
        """To the last token."""
        return self.arrivals_s[-1] - self.scheduled_s if self.arrivals_s else None

    @property
    def tpot_s(self) -> float | None:
        """The mean time of a token behind the first; None: there is none."""
        if self.num_tokens < 2 or not self.arrivals_s:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.num_tokens - 1)

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """ITL: between arrivals."""
        return tuple(later - earlier for earlier, later in itertools.pairwise(self.arrivals_s))

    @property
    def tbt_s(self) -> float | None:
        """The mean of the longest tenth of the gaps, of one at least; None: there is none."""
        gaps = sorted(self.gaps_s, reverse=True)
        longest = gaps[: math.ceil(len(gaps) * TBT_SHARE)]
        return sum(longest) / len(longest) if longest else None
