"""What a request cost: the operations and bytes of its two phases, and the rates at which they were done."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pdserve.bench.work import ModelShape, Rates, decode_work, is_memory_bound, prefill_work
from pdserve.client import Finished

# Below that a prefill reads the weights for so few tokens that its rate says nothing of others.
_MIN_COMPUTED_TOKENS = 64


@dataclass(frozen=True, slots=True)
class PhaseCost:
    """`amount`: operations of the prefill; bytes read for one step of decoding. Rates are per second; `peak`
    is None where the machine that did it could not be measured."""

    amount: float
    rate: float
    peak: float | None
    is_memory_bound: bool | None

    @property
    def share(self) -> float | None:
        return self.rate / self.peak if self.peak else None


@dataclass(frozen=True, slots=True)
class Costs:
    """None: the phase did nothing that could be timed."""

    prefill: PhaseCost | None
    decode: PhaseCost | None
    # Seconds that all tokens behind the first would have taken, had each read the whole text again.
    recompute_s: float | None


def costs_of(
    finished: Finished, shape: ModelShape, prefill_rates: Rates | None, decode_rates: Rates | None
) -> Costs:
    """The rates are those of the machines that did the prefill and the decoding; None: not known."""
    prefill = _prefill(finished, shape, prefill_rates)
    return Costs(
        prefill, _decode(finished, shape, decode_rates), _recompute_s(finished, shape, prefill, prefill_rates)
    )


def _prefill(finished: Finished, shape: ModelShape, rates: Rates | None) -> PhaseCost | None:
    usage, seconds = finished.usage, finished.timings.prefill_ms / 1000
    if seconds <= 0:
        return None
    work = prefill_work(shape, usage.prompt_tokens, usage.cached_tokens)
    peak = rates.operations if rates is not None else None
    bound = is_memory_bound(work, rates) if rates is not None else None
    return PhaseCost(work.operations, work.operations / seconds, peak, bound)


def _decode(finished: Finished, shape: ModelShape, rates: Rates | None) -> PhaseCost | None:
    """Guesses that came true came with the step of another token. Where the worker decoded for others in the
    same steps, these read more than is counted here: their K and V."""
    usage = finished.usage
    num_steps = usage.completion_tokens - 1 - usage.accepted_draft_tokens
    seconds = finished.timings.decode_ms / 1000
    if num_steps < 1 or seconds <= 0:
        return None
    work = decode_work(shape, 1, usage.prompt_tokens + usage.completion_tokens / 2)
    peak = rates.num_bytes if rates is not None else None
    bound = is_memory_bound(work, rates) if rates is not None else None
    return PhaseCost(work.num_bytes, work.num_bytes * num_steps / seconds, peak, bound)


def _recompute_s(
    finished: Finished, shape: ModelShape, prefill: PhaseCost | None, rates: Rates | None
) -> float | None:
    """At the rate of this request's own prefill, or the machine's where that was too short to tell."""
    usage = finished.usage
    is_told = usage.prompt_tokens - usage.cached_tokens >= _MIN_COMPUTED_TOKENS
    rate = prefill.rate if prefill is not None and is_told else (rates.operations if rates else None)
    if rate is None or usage.completion_tokens < 2:
        return None
    lengths = range(usage.prompt_tokens + 1, usage.prompt_tokens + usage.completion_tokens)
    return math.fsum(prefill_work(shape, length).operations for length in lengths) / rate
