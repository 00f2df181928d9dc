"""An ideal 1P1D: one core prefills, one decodes, at measured rates, and nothing costs anything beside them.

A prompt is prefilled alone, and to its end or by turns; its first token is there at its end. All answers
that have begun decode together, a token each in every step; one that begins waits for the running step to
end. Hand-over, scheduling and network take no time: what a real 1P1D with the same queue lacks to it is its
overhead.

Its goodput turns on the longest prompts. Of the conversation trace's window of 100 requests, five are
clipped to 4,000 tokens. Where a core prefills those within the objective's 4 s, all ten that may fail are
left to queueing; where it does not, five of the ten have failed before anybody waits. With decoding free,
first come first served:

    prefill at 1,024 tokens, tok/s   4,000 tokens take   goodput at TTFT <= 2 s   <= 4 s
    1,980 (the arithmetic's limit)   3.1 s               0.52 req/s               1.17
    1,540                            4.0 s               0.30                     0.66
    1,380                            4.5 s               0.24                     0.52
    770                              8.0 s               0.04                     0.15

So a bound from arithmetic alone is twice what the same simulation gives at the rates that an engine
reaches, and neither is wrong. Decode's measured times change nothing below one request a second.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.disagg_vs_colocated.phases import PhaseTimes
from pdserve.bench.serve.records import RequestRecord
from pdserve.bench.serve.workload import PlannedRequest
from router.queue_order import QueuePolicy


@dataclass(slots=True)
class _Answer:
    index: int
    context: int  # tokens whose K and V are there
    num_left: int
    arrivals_s: list[float]


def simulate(
    requests: Sequence[PlannedRequest],
    times: PhaseTimes,
    policy: QueuePolicy,
    max_num_seqs: int = 64,
    turn_tokens: int | None = None,
) -> list[RequestRecord]:
    """One record for each request, in their order. Prompts' lengths have to be known. `turn_tokens`: of a
    prompt that are computed before the next choice, by what is left of each; None: all.
    """
    first_at = _prefill(requests, times, policy, turn_tokens)
    answers = [
        _Answer(index, _length(request), request.max_tokens - 1, [first_at[index]])
        for index, request in enumerate(requests)
    ]
    _decode(answers, times, max_num_seqs)
    return [_record(request, answer) for request, answer in zip(requests, answers, strict=True)]


def _prefill(
    requests: Sequence[PlannedRequest], times: PhaseTimes, policy: QueuePolicy, turn_tokens: int | None
) -> list[float]:
    """When each prompt's first token is there."""
    left = [_length(request) for request in requests]
    # The next one is the last in the list; of those that come at once, in their order.
    coming = sorted(range(len(requests)), key=lambda index: requests[index].at_s)[::-1]
    first_at = [0.0] * len(requests)
    waiting: list[int] = []
    now = 0.0
    while coming or waiting:
        if not waiting:
            now = max(now, requests[coming[-1]].at_s)
        while coming and requests[coming[-1]].at_s <= now:
            waiting.append(coming.pop())
        chosen = min(waiting, key=lambda each: policy.rank(left[each], now - requests[each].at_s))
        end = _length(requests[chosen])
        begin = end - left[chosen]
        left[chosen] -= min(left[chosen], turn_tokens or end)
        now += times.prefill_s(end - left[chosen]) - (times.prefill_s(begin) if begin else 0.0)
        if left[chosen] == 0:
            waiting.remove(chosen)
            first_at[chosen] = now
    return first_at


def _decode(answers: Sequence[_Answer], times: PhaseTimes, max_num_seqs: int) -> None:
    """Adds to each answer when its tokens come."""
    coming = [(answer.arrivals_s[0], answer.index) for answer in answers if answer.num_left]
    heapq.heapify(coming)
    running: list[_Answer] = []
    now = 0.0
    while coming or running:
        if not running:
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now and len(running) < max_num_seqs:
            running.append(answers[heapq.heappop(coming)[1]])
        now += times.step_s(len(running), sum(answer.context for answer in running))
        for answer in running:
            answer.arrivals_s.append(now)
            answer.context += 1
            answer.num_left -= 1
        running = [answer for answer in running if answer.num_left]


def _length(request: PlannedRequest) -> int:
    if request.num_prompt_tokens is None:
        raise ValueError("the ideal wants prompts whose length is known")
    return request.num_prompt_tokens


def _record(request: PlannedRequest, answer: _Answer) -> RequestRecord:
    return RequestRecord(
        index=answer.index,
        scheduled_s=request.at_s,
        sent_s=request.at_s,
        ended_s=answer.arrivals_s[-1],
        arrivals_s=tuple(answer.arrivals_s),
        num_prompt_tokens=_length(request),
        num_cached_tokens=0,
        num_tokens=len(answer.arrivals_s),
        failure=None,
        timings=None,
    )
