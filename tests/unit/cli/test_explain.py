"""`generate --explain`: costs worked out by hand, and the picture of a request."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from pdserve.bench.work import ModelShape, Rates, decode_work, prefill_work
from pdserve.cli.answer import Answer
from pdserve.cli.console import out
from pdserve.cli.costs import costs_of
from pdserve.cli.explain import Facts, cost_rows, explanation
from pdserve.cli.picture import draw
from pdserve.client import Finished, FinishReason, Model, Role, Started, Timings, Usage
from tests.unit.cli.test_shown import cluster, pool

SHAPE = ModelShape(1_000_000, 100_000, 4, 2, 16, (None, None), 2)
RATES = Rates(operations=1e9, num_bytes=1e8)


def finished(
    prompt: int = 200, cached: int = 0, output: int = 11, drafts: int = 0, prefill_ms: float = 500.0
) -> Finished:
    timings = Timings(
        queue_ms=50.0,
        prefill_ms=prefill_ms,
        transfer_ms=300.0,
        transfer_bytes=4_000_000,
        ttft_ms=600.0,
        decode_ms=400.0 if output > 1 else 0.0,
        mean_itl_ms=40.0,
        handover_ms=50.0,
        decode_start_ms=60.0,
        hidden_bytes=3_000_000,
        reserve_ms=1.0,
    )
    usage = Usage(prompt, cached, output, drafts, drafts)
    return Finished(0, FinishReason.LENGTH, None, None, usage, timings, 0, "prefill-0", "decode-0")


def test_a_prefill_is_its_operations_over_its_time_and_a_step_its_bytes() -> None:
    costs = costs_of(finished(), SHAPE, RATES, RATES)
    assert costs.prefill is not None
    assert costs.decode is not None
    assert costs.prefill.amount == prefill_work(SHAPE, 200).operations
    assert costs.prefill.rate == pytest.approx(costs.prefill.amount / 0.5)
    assert costs.prefill.share == pytest.approx(costs.prefill.rate / 1e9)
    assert costs.prefill.is_memory_bound is False
    assert costs.decode.amount == decode_work(SHAPE, 1, 200 + 11 / 2).num_bytes
    assert costs.decode.rate == pytest.approx(costs.decode.amount * 10 / 0.4)
    assert costs.decode.is_memory_bound is True


def test_guesses_that_came_true_are_no_steps_of_their_own() -> None:
    plain, drafted = (costs_of(finished(drafts=n), SHAPE, None, None).decode for n in (0, 5))
    assert plain is not None
    assert drafted is not None
    assert drafted.rate == pytest.approx(plain.rate / 2)
    assert drafted.share is None


def test_what_was_cached_was_not_computed() -> None:
    whole, cached = (costs_of(finished(cached=n), SHAPE, None, None).prefill for n in (0, 150))
    assert whole is not None
    assert cached is not None
    assert cached.amount < whole.amount / 3


def test_without_the_cache_each_token_would_have_read_the_whole_text() -> None:
    costs = costs_of(finished(output=4), SHAPE, None, None)
    assert costs.prefill is not None
    operations = sum(prefill_work(SHAPE, length).operations for length in (201, 202, 203))
    assert costs.recompute_s == pytest.approx(operations / costs.prefill.rate)
    # A prompt that was nearly all cached says nothing of what a prefill takes: the machine does.
    assert costs_of(finished(cached=190), SHAPE, None, None).recompute_s is None
    known = costs_of(finished(cached=190, output=4), SHAPE, RATES, RATES)
    assert known.recompute_s == pytest.approx(operations / 1e9)


def test_one_token_has_neither_steps_nor_savings() -> None:
    costs = costs_of(finished(output=1), SHAPE, RATES, RATES)
    assert costs.decode is None
    assert costs.recompute_s is None
    assert costs_of(finished(output=1, prefill_ms=0.0), SHAPE, RATES, RATES).prefill is None


def answer(of: Finished) -> Answer:
    return Answer(0, Started(0, 200, 0, "prefill-0", "decode-0", "r"), of)


@pytest.mark.parametrize(
    ("rates", "told"),
    [
        (Rates(1e10, 1e9), "of this machine's 10 GFLOP/s, bound by arithmetic"),
        (
            Rates(1e8, 1e9),
            "all that this machine does, bound by arithmetic (measured just now: 0",
        ),
        (None, "GFLOP/s"),
    ],
)
def test_costs_are_told_beside_what_the_machine_does(rates: Rates | None, told: str) -> None:
    of = answer(finished())
    rows = {name: text for name, _, text in cost_rows(of, costs_of(finished(), SHAPE, rates, rates))}
    assert told in rows["prefill's work"]
    assert ("machine" in rows["decode's work"]) is (rates is not None)
    assert "each token the whole text again" in rows["KV cache"]


def test_workers_elsewhere_are_explained_without_this_machines_rates() -> None:
    model = Model("m", 10, 10, "bfloat16", (), True, None)
    facts = Facts(model, cluster(pool(Role.PREFILL, 1)))
    for known in (None, facts):
        with out.capture() as captured:
            out.print(explanation([answer(finished())], known))
        assert "prefill's work" not in captured.get()
        assert "first token, 600 ms" in captured.get()


def lines(of: Finished, width: int = 40) -> list[str]:
    return [re.sub(r"\[[^\]]*\]", "", line) for line in draw(of, width)]


def test_the_picture_has_every_phase_at_its_time() -> None:
    queue, prefill, kv, decode, first = lines(finished())
    assert queue == "queue    ██" + " " * 40 + "router"  # 50 of 1,000 ms
    assert prefill.startswith("prefill  " + "  " + "█" * 20 + " ")
    # All KV came 50 ms behind the end of the prefill, the first of it 300 ms before that.
    assert kv.startswith("KV       " + " " * 12 + "█" * 12 + " ")
    assert kv.endswith("prefill-0 → decode-0")
    assert decode.startswith("decode   " + " " * 24 + "█" * 16 + " ")
    assert first.index("▲") in (9 + 24, 9 + 23)
    assert first.endswith("1000 ms in all")


def test_what_was_lost_before_the_first_token_is_left_out_of_the_picture() -> None:
    of = finished()
    of = replace(of, num_resumes=1, timings=replace(of.timings, ttft_ms=1600.0))  # of 2,000 ms
    queue, prefill, kv, *_ = lines(of)
    assert queue.startswith("queue    █ ")
    assert prefill.startswith("prefill  " + " " * 22 + "█" * 10 + " ")
    assert kv.startswith("KV       " + " " * 27 + "█" * 6 + " ")


def test_a_request_that_was_its_first_token_has_no_decode() -> None:
    of = finished(output=1)
    of = replace(of, timings=replace(of.timings, transfer_bytes=0, transfer_ms=0.0))
    assert [line.split()[0] for line in lines(of)][:2] == ["queue", "prefill"]
    assert "first token" in lines(of)[2]
    assert draw(replace(of, timings=replace(of.timings, ttft_ms=0.0)), 40) == []


@pytest.mark.parametrize("width", [10, 40, 120])
def test_no_bar_leaves_its_columns(width: int) -> None:
    for of in (finished(), finished(output=1), finished(prefill_ms=0.001), finished(prefill_ms=9e9)):
        for line in lines(of, width)[:-1]:
            assert len(line.rstrip()) <= 9 + width + 2 + len("prefill-0 → decode-0")
