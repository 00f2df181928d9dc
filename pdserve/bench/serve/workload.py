"""What is asked, and when."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdserve.bench.errors import BenchError

Prompt = str | tuple[int, ...]
"""Text or token ids."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    at_s: float  # since the run begins
    prompt: Prompt
    max_tokens: int
    # None where only the server can count a text's tokens.
    num_prompt_tokens: int | None


@dataclass(frozen=True, slots=True)
class Limits:
    """Longer ones are clipped; None: as long as they are."""

    max_prompt_tokens: int | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Scaling:
    """What was done to a trace."""

    trace_start_s: float
    trace_rate: float  # requests a second, in the trace
    num_clipped_prompts: int
    num_clipped_answers: int
    # Tokens that stand for one block of the trace, and how many it had; None: it has no blocks.
    block_tokens: int | None
    trace_block_tokens: int | None


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of their times, the first at 0."""

    name: str
    requests: tuple[PlannedRequest, ...]
    scaling: Scaling | None = None

    @property
    def rate(self) -> float:
        """Requests a second; infinite where all come at once."""
        return mean_rate([request.at_s for request in self.requests])

    @property
    def time_factor(self) -> float | None:
        """A trace's seconds times this are the run's. None: it is no trace, or all of it comes at once."""
        if self.scaling is None or math.isinf(self.scaling.trace_rate):
            return None
        return self.scaling.trace_rate / self.rate

    def at_rate(self, rate: float) -> Workload:
        """The same requests with all gaps stretched by one factor. Raises BenchError."""
        if not rate > 0:
            raise BenchError(f"a rate of {rate:g} requests a second: it has to be above 0")
        if len(self.requests) > 1 and math.isinf(self.rate) and not math.isinf(rate):
            raise BenchError(f"{self.name}: all requests come at once, there are no gaps to stretch")
        factor = self.rate / rate if math.isfinite(rate) and len(self.requests) > 1 else 0.0
        requests = tuple(replace(request, at_s=request.at_s * factor) for request in self.requests)
        return replace(self, requests=requests)


def mean_rate(times_s: Sequence[float]) -> float:
    """Of sorted times, by the gaps between them; infinite where there are none."""
    span = times_s[-1] - times_s[0] if times_s else 0.0
    return (len(times_s) - 1) / span if span > 0 else math.inf
