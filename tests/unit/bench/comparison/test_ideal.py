"""The ideal 1P1D: by hand, in seconds that are whole numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.disagg_vs_colocated.ideal import simulate
from benchmarks.disagg_vs_colocated.phases import PhaseTimes, PrefillTime, StepTime
from pdserve.bench.serve.workload import PlannedRequest
from router.config import QueueOrder
from router.queue_order import QueuePolicy

FCFS = QueuePolicy(QueueOrder.FCFS, aging_s=30.0)
SHORTEST = QueuePolicy(QueueOrder.SHORTEST, aging_s=30.0)
# 100 tokens a second; a step takes 1 s and 1 ms for each token of context.
TIMES = PhaseTimes(
    [PrefillTime(100, 1.0), PrefillTime(1000, 10.0)],
    [StepTime(1, 0, 1.0), StepTime(1, 1000, 2.0), StepTime(2, 0, 1.0), StepTime(2, 1000, 3.0)],
)
# The same prefill; every step takes a second.
EVEN = PhaseTimes(TIMES.prefills, [StepTime(batch, at, 1.0) for batch in (1, 2) for at in (0, 1000)])


def asked(at_s: float, num_prompt_tokens: int, max_tokens: int = 1) -> PlannedRequest:
    return PlannedRequest(at_s, (), max_tokens, num_prompt_tokens)


def arrivals(
    *requests: PlannedRequest,
    times: PhaseTimes = EVEN,
    policy: QueuePolicy = FCFS,
    max_num_seqs: int = 64,
    turn_tokens: int | None = None,
) -> list[tuple[float, ...]]:
    return [record.arrivals_s for record in simulate(requests, times, policy, max_num_seqs, turn_tokens)]


def test_prompts_are_prefilled_one_after_the_other() -> None:
    assert arrivals(asked(0, 300), asked(1, 200), asked(10, 100)) == [(3.0,), (5.0,), (11.0,)]


def test_the_queue_has_the_routers_order() -> None:
    requests = asked(0, 300), asked(1, 500), asked(2, 100)
    assert arrivals(*requests) == [(3.0,), (8.0,), (9.0,)]
    assert arrivals(*requests, policy=SHORTEST) == [(3.0,), (9.0,), (4.0,)]


def test_by_turns_a_short_prompt_goes_before_the_rest_of_a_long_one() -> None:
    """At 2 s the first has 100 tokens left, and keeps its place; the second's turn at 4 s is given away."""
    requests = asked(0, 300), asked(1, 500), asked(2, 200), asked(3.5, 50)
    assert arrivals(*requests, policy=SHORTEST, turn_tokens=100) == [(3.0,), (10.5,), (5.5,), (4.5,)]
    assert arrivals(*requests, policy=FCFS, turn_tokens=100) == arrivals(*requests, policy=FCFS)
    longer = asked(0, 300), asked(1, 150)
    assert arrivals(*longer, policy=SHORTEST, turn_tokens=100) == [(4.5,), (2.5,)]


def test_who_has_waited_long_enough_is_not_overtaken_by_short_ones() -> None:
    """A 10 s prompt, and a prompt of 1 s each second: it goes before those that come from 30 s on."""
    short = [asked(float(at), 100) for at in range(100)]
    long, *others = arrivals(asked(0.5, 1000), *short, policy=SHORTEST)
    assert long[0] <= 41.0
    assert sum(first < long[0] for (first,) in others) <= 31


def test_a_step_gives_each_answer_a_token_and_who_comes_meanwhile_waits_for_its_end() -> None:
    first, second = arrivals(asked(0, 100, 4), asked(0, 150, 3))
    assert first == (1.0, 2.0, 3.0, 4.0)
    # Its first token is there at 2.5, in the middle of a step.
    assert second == (2.5, 4.0, 5.0)


def test_a_step_takes_as_long_as_its_batch_and_context_do() -> None:
    (first,) = arrivals(asked(0, 100, 3), times=TIMES)
    assert first == pytest.approx((1.0, 2.1, 3.201))


def test_no_more_decode_together_than_may() -> None:
    assert arrivals(asked(0, 100, 3), asked(0, 100, 2), max_num_seqs=1) == [(1.0, 2.0, 3.0), (2.0, 4.0)]


def test_times_are_in_straight_lines_between_what_was_measured_and_beyond() -> None:
    assert TIMES.prefill_s(550) == pytest.approx(5.5)
    assert TIMES.prefill_s(2000) == pytest.approx(20.0)
    assert TIMES.step_s(1, 500) == pytest.approx(1.5)
    wide = PhaseTimes(TIMES.prefills, [StepTime(b, at, float(b)) for b in (1, 3, 5) for at in (1, 9)])
    assert wide.step_s(2, 100) == pytest.approx(2.0)
    assert wide.step_s(7, 100) == pytest.approx(7.0)


@pytest.mark.parametrize("contexts", [(1,), (1, 1)])
def test_one_context_is_not_enough_for_a_line(contexts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="one context only"):
        PhaseTimes(TIMES.prefills, [StepTime(1, at, 1.0) for at in contexts])


REQUESTS = st.lists(
    st.builds(asked, st.floats(0, 50), st.integers(1, 4000), st.integers(1, 20)), min_size=1, max_size=20
)


@given(REQUESTS, st.sampled_from([FCFS, SHORTEST]), st.integers(1, 4))
def test_everybody_gets_every_token_and_the_prefill_core_never_idles_while_somebody_waits(
    requests: list[PlannedRequest], policy: QueuePolicy, max_num_seqs: int
) -> None:
    records = simulate(requests, TIMES, policy, max_num_seqs)
    for request, record in zip(requests, records, strict=True):
        assert len(record.arrivals_s) == request.max_tokens
        assert list(record.arrivals_s) == sorted(record.arrivals_s)
        assert record.arrivals_s[0] >= request.at_s + TIMES.prefill_s(request.num_prompt_tokens or 0) - 1e-6
    # Whatever the order, the core is through with the work at the same time.
    now = 0.0
    for request in sorted(requests, key=lambda each: each.at_s):
        now = max(now, request.at_s) + TIMES.prefill_s(request.num_prompt_tokens or 0)
    assert max(record.arrivals_s[0] for record in records) == pytest.approx(now)


@given(st.lists(st.tuples(st.integers(16, 4000), st.floats(0, 100)), min_size=2, max_size=60))
def test_first_come_first_served_waits_as_queueing_theory_says(asks: list[tuple[int, float]]) -> None:
    """Lindley's recursion: one waits for what is left of the one before, less the time between the two."""
    at_s = waits_s = 0.0
    requests, ttfts_s = [], []
    for length, gap_s in asks:
        at_s += gap_s
        waits_s = max(0.0, waits_s - gap_s)
        requests.append(asked(at_s, length))
        waits_s += EVEN.prefill_s(length)
        ttfts_s.append(waits_s)
    records = simulate(requests, EVEN, FCFS)
    assert [each.arrivals_s[0] - each.scheduled_s for each in records] == pytest.approx(ttfts_s, abs=1e-6)
