"""Whose prompt goes on first: by arrival, or the one with the least left of it."""

from __future__ import annotations

import pytest

from engine.engine import Engine
from engine.prefill_order import ShortestFirst
from engine.request import SequenceRequest, Until
from tests.unit.engine.driving import drain, generate, prompt, request

CHUNK = 32
SETTINGS: dict[str, object] = {"max_num_batched_tokens": CHUNK, "num_blocks": 64}


def first_token_only(length: int, seed: int = 0) -> SequenceRequest:
    return request(prompt(length, seed), until=Until.FIRST_TOKEN)


def order_of_ends(engine: Engine) -> list[str]:
    ended: list[str] = []
    while engine.has_work:
        ended += [output.sequence_id for output in engine.step().outputs if output.is_last]
    return ended


@pytest.mark.parametrize("order", ["fcfs", "shortest"])
def test_a_short_prompt_goes_before_the_rest_of_a_long_one_where_that_is_asked(order, make_engine):
    engine = make_engine(prefill_order=order, **SETTINGS)
    long, middle, short = first_token_only(200), first_token_only(70), first_token_only(20)
    engine.add(long)
    engine.step()
    engine.add(middle)
    engine.step()
    engine.add(short)
    ids = [each.sequence_id for each in (long, middle, short)]
    assert order_of_ends(engine) == (ids if order == "fcfs" else ids[::-1])


def test_what_is_nearly_done_is_not_interrupted_by_what_takes_longer(make_engine):
    engine = make_engine(prefill_order="shortest", **SETTINGS)
    nearly_done, other = first_token_only(100), first_token_only(60)
    engine.add(nearly_done)
    engine.step()
    engine.step()
    engine.add(other)
    assert order_of_ends(engine) == [nearly_done.sequence_id, other.sequence_id]


def test_both_share_a_step_where_the_short_one_leaves_some_of_it(make_engine):
    engine = make_engine(prefill_order="shortest", **SETTINGS)
    long, short = first_token_only(200), first_token_only(20)
    engine.add(long)
    engine.step()
    engine.add(short)
    outputs = {output.sequence_id: output for output in engine.step().outputs}
    assert outputs[short.sequence_id].is_last
    assert outputs[long.sequence_id].num_computed_tokens == CHUNK + (CHUNK - 20)
    drain(engine)


def test_what_a_cache_has_of_a_prompt_does_not_count(make_engine):
    engine = make_engine(prefill_order="shortest", **SETTINGS)
    generate(engine, request(prompt(160, seed=1), max_tokens=1))
    long, cached, short = first_token_only(200), first_token_only(160, seed=1), first_token_only(40)
    for each in (long, short, cached):
        engine.add(each)
    assert order_of_ends(engine) == [each.sequence_id for each in (cached, short, long)]


def test_no_stream_of_short_prompts_keeps_a_long_one_for_ever(make_engine, monkeypatch):
    now = 0.0
    engine = make_engine(prefill_order="shortest", prefill_aging_s=10.0, **SETTINGS)
    monkeypatch.setattr(engine._scheduler, "_order", ShortestFirst(10.0, lambda: now))
    monkeypatch.setattr("engine.engine.time.monotonic", lambda: now)
    long = first_token_only(8 * CHUNK)
    engine.add(long)
    num_steps = 0
    while True:
        engine.add(first_token_only(CHUNK, seed=num_steps))
        now += 1.0
        num_steps += 1
        if long.sequence_id in {output.sequence_id for output in engine.step().outputs if output.is_last}:
            break
        assert num_steps < 20, "it starves"
    assert num_steps > 10
    drain(engine)


def test_new_ones_do_not_take_the_room_that_one_before_them_waits_for(make_engine, monkeypatch):
    engine = make_engine(
        prefill_order="shortest", enable_prefix_caching=False, max_num_batched_tokens=CHUNK, num_blocks=16
    )
    now = 0.0
    monkeypatch.setattr(engine._scheduler, "_order", ShortestFirst(10.0, lambda: now))
    monkeypatch.setattr("engine.engine.time.monotonic", lambda: now)
    running, wide, small = first_token_only(150), first_token_only(200), first_token_only(90)
    engine.add(running)
    engine.step()
    engine.add(wide)
    now = 11.0  # both are as old as can be
    engine.add(small)  # there is room for it, but not for the one before
    assert order_of_ends(engine) == [each.sequence_id for each in (running, wide, small)]


@pytest.mark.parametrize("order", ["fcfs", "shortest"])
def test_an_answer_that_was_interrupted_goes_on_before_new_prompts(order, make_engine):
    engine = make_engine(
        prefill_order=order, enable_prefix_caching=False, max_num_batched_tokens=CHUNK, num_blocks=16
    )
    engine.add(request(prompt(100), max_tokens=80))
    young = request(prompt(90), max_tokens=80)
    engine.add(young)
    while engine.snapshot().num_preemptions == 0:
        engine.step()
    while engine.snapshot().num_running:
        engine.step()  # until the old one ends, there is no room for the young one
    for seed in range(10):
        engine.add(first_token_only(CHUNK, seed=seed))
    drawn: list[str] = []
    while not drawn:
        drawn += [output.sequence_id for output in engine.step().outputs if output.new_tokens]
    assert drawn == [young.sequence_id]
    drain(engine)


@pytest.mark.parametrize("order", ["fcfs", "shortest"])
def test_the_order_changes_no_token(order, make_engine, reference):
    engine = make_engine(prefill_order=order, **SETTINGS)
    prompts = [prompt(length, seed=length) for length in (150, 20, 90, 33, 64)]
    expected = [reference("llama").generate(ids, 6) for ids in prompts]
    items = [request(ids, max_tokens=6) for ids in prompts]
    tokens: dict[str, list[int]] = {}
    for item in items:  # each comes while the ones before are computed
        engine.add(item)
        for output in engine.step().outputs:
            tokens.setdefault(output.sequence_id, []).extend(t.token_id for t in output.new_tokens)
    for sequence_id, outputs in drain(engine).items():
        tokens.setdefault(sequence_id, []).extend(t.token_id for o in outputs for t in o.new_tokens)
    assert [tokens[item.sequence_id] for item in items] == expected


def test_the_time_in_which_others_go_first_is_the_queues(make_engine, monkeypatch):
    engine = make_engine(prefill_order="shortest", **SETTINGS)
    now, run = 0.0, engine._runner.run

    def run_for_a_second(*arguments: object) -> object:
        nonlocal now
        now += 1.0
        return run(*arguments)

    monkeypatch.setattr(engine._runner, "run", run_for_a_second)
    monkeypatch.setattr(engine._scheduler, "_order", ShortestFirst(30.0, lambda: now))
    monkeypatch.setattr("engine.engine.time.monotonic", lambda: now)
    long, short = first_token_only(3 * CHUNK), first_token_only(CHUNK, seed=1)
    engine.add(long)
    engine.step()
    engine.add(short)
    reports = {}
    while engine.has_work:
        reports |= {each.sequence_id: each.prefill for each in engine.step().outputs if each.prefill}
    assert (reports[short.sequence_id].queue_ms, reports[short.sequence_id].prefill_ms) == (0, 1000)
    assert (reports[long.sequence_id].queue_ms, reports[long.sequence_id].prefill_ms) == (1000, 3000)
