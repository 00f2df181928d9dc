"""What the engine promises about sequences: ends, prefix hits, preemption, cancels, refusals, faults."""

from __future__ import annotations

import itertools
from dataclasses import replace

import psutil
import pytest
import torch

from engine.errors import CannotFit, IntegrityError
from engine.request import Until
from engine.sampling import FinishReason, SamplingParams, StopConditions
from engine.scheduler import Chunk
from engine.sequence import Sequence, SequenceState
from engine.stopping import banned_token_ids, finish_reason
from tests.unit.engine.driving import drain, generate, preempt, prompt, request, tokens_of

BLOCK = 16
EOS = frozenset({7})
DRAWING = SamplingParams(temperature=0.8, top_p=0.95, seed=11)


@pytest.mark.parametrize(
    ("stop", "token_id", "num_output", "expected"),
    [
        (StopConditions(5), 7, 1, FinishReason.EOS),
        (StopConditions(5, ignore_eos=True), 7, 1, None),
        (StopConditions(5, stop_token_ids=frozenset({7}), ignore_eos=True), 7, 1, FinishReason.STOP),
        (StopConditions(5, stop_token_ids=frozenset({9})), 9, 1, FinishReason.STOP),
        (StopConditions(5, min_tokens=2), 7, 2, None),
        (StopConditions(5, min_tokens=2), 7, 3, FinishReason.EOS),
        (StopConditions(1), 3, 1, FinishReason.LENGTH),
        (StopConditions(1), 7, 1, FinishReason.EOS),
        (StopConditions(2), 3, 1, None),
    ],
)
def test_one_rule_says_where_a_sequence_ends(stop, token_id, num_output, expected):
    assert finish_reason(stop, EOS, token_id, num_output) is expected


def test_nothing_that_would_end_it_can_be_drawn_before_min_tokens():
    stop = StopConditions(9, min_tokens=2, stop_token_ids=frozenset({3}))
    assert banned_token_ids(stop, EOS, 1) == {3, 7}
    assert banned_token_ids(stop, EOS, 2) == frozenset()
    assert banned_token_ids(replace(stop, ignore_eos=True), EOS, 0) == {3}


def test_the_first_token_can_end_a_sequence(engine, reference):
    ids = prompt(20)
    first = reference("llama").generate(ids, 1)
    stopping = StopConditions(9, stop_token_ids=frozenset(first))
    for until in Until:
        item = replace(request(ids), stop=stopping, until=until)
        engine.add(item)
        (output,) = drain(engine)[item.sequence_id]
        assert output.finish_reason is FinishReason.STOP
        assert [token.token_id for token in output.new_tokens] == first
        assert output.is_last


def test_max_tokens_of_one_gives_one_token(engine):
    item = request(prompt(5), max_tokens=1)
    engine.add(item)
    (output,) = drain(engine)[item.sequence_id]
    assert output.finish_reason is FinishReason.LENGTH
    assert len(output.new_tokens) == 1


def test_min_tokens_keeps_the_end_from_being_drawn(engine):
    eos = next(iter(engine.model.eos_token_ids))
    wants_eos = SamplingParams(logit_bias=((eos, 1000.0),))
    item = replace(request(prompt(5), sampling=wants_eos), stop=StopConditions(9, min_tokens=3))
    (output,) = generate(engine, item)
    assert output.index(eos) == len(output) - 1 == 3


def test_known_tokens_count_for_max_and_min_tokens(engine):
    eos = next(iter(engine.model.eos_token_ids))
    wants_eos = SamplingParams(logit_bias=((eos, 1000.0),))
    item = request(prompt(5), known=(1, 2), sampling=wants_eos)
    assert generate(engine, replace(item, stop=StopConditions(9, min_tokens=2))) == [[eos]]
    assert len(generate(engine, request(prompt(5), 6, known=(1, 2)))[0]) == 4


def test_a_prefill_sequence_leaves_with_its_first_token_and_holds_its_blocks(engine, reference):
    ids = prompt(40)
    item = request(ids, until=Until.FIRST_TOKEN, hold_blocks=True)
    engine.add(item)
    outputs = drain(engine)[item.sequence_id]
    (token,) = tokens_of(outputs)
    assert [token.token_id] == reference("llama").generate(ids, 1)
    assert outputs[-1].finish_reason is None
    assert len(engine.block_table(item.sequence_id)) == 3
    assert engine.snapshot().blocks_used == 3
    engine.check_integrity()
    with pytest.raises(ValueError, match="in use"):
        engine.add(item)
    assert engine.release_hold(item.sequence_id)
    assert not engine.release_hold(item.sequence_id)
    with pytest.raises(KeyError):
        engine.block_table(item.sequence_id)


def test_outputs_tell_how_far_the_kv_is_final(make_engine):
    engine = make_engine(max_num_batched_tokens=BLOCK)
    item = request(prompt(40), until=Until.FIRST_TOKEN)
    engine.add(item)
    assert [o.num_computed_tokens for o in drain(engine)[item.sequence_id]] == [16, 32, 40]


def test_of_a_resumed_sequence_only_the_prompt_counts_as_cached(engine, reference):
    ids = prompt(BLOCK + 3)
    known = reference("llama").generate(ids, 2 * BLOCK)
    generate(engine, request((*ids, *known), 2))
    item = request(ids, 3 * BLOCK, known=known)
    engine.add(item)
    first = next(output for output in drain(engine)[item.sequence_id] if output.prefill is not None)
    assert first.prefill.cached_tokens == len(ids)


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1])
def test_a_warm_prompt_hits_whole_blocks_but_never_its_last_token(length, engine):
    reports = []
    for _ in range(2):
        item = request(prompt(length), 1)
        engine.add(item)
        reports.append(drain(engine)[item.sequence_id][-1].prefill)
    cold, warm = reports
    assert cold is not None
    assert warm is not None
    assert cold.cached_tokens == 0
    assert warm.cached_tokens == (length - 1) // BLOCK * BLOCK
    assert cold.queue_ms >= 0
    assert cold.prefill_ms > 0


def test_equal_prompts_at_once_do_not_hit_what_is_not_computed(engine, reference):
    ids = prompt(2 * BLOCK + 3)
    outputs = generate(engine, *(request(ids) for _ in range(4)))
    assert outputs == [reference("llama").generate(ids, 20)] * 4


def test_output_is_cached_too_and_a_branch_shares_only_what_is_equal(engine, reference):
    ids = prompt(BLOCK)
    first = reference("llama").generate(ids, 20)
    generate(engine, request(ids))
    longer = (*ids, *first)
    branch = (*longer[:20], 1, *longer[21:])
    for prompt_ids, cached in ((longer, 2 * BLOCK), (branch, BLOCK)):
        item = request(prompt_ids, 5)
        engine.add(item)
        outputs = drain(engine)[item.sequence_id]
        assert outputs[-5].prefill is not None
        assert outputs[-5].prefill.cached_tokens == cached
        assert [t.token_id for t in tokens_of(outputs)] == reference("llama").generate(prompt_ids, 5)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        DRAWING,
        replace(DRAWING, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2),
    ],
    ids=["greedy", "seeded", "penalties"],
)
@pytest.mark.parametrize("is_caching", [True, False])
def test_preemption_changes_no_token(sampling, is_caching, make_engine):
    prompts = [prompt(length) for length in (20, 31, 16, 3)]
    roomy = make_engine(enable_prefix_caching=is_caching)
    undisturbed = [generate(roomy, request(ids, 60, sampling=sampling))[0] for ids in prompts]
    tight = make_engine(num_blocks=11, enable_prefix_caching=is_caching, max_recompute_tokens=8)
    together = generate(tight, *(request(ids, 60, sampling=sampling) for ids in prompts))
    assert tight.snapshot().num_preemptions > 0
    assert together == undisturbed


def test_recompute_is_rationed_beside_others_that_decode(make_engine, monkeypatch):
    engine = make_engine(num_blocks=11, enable_prefix_caching=False, max_recompute_tokens=8)
    schedule = engine._scheduler.schedule
    rationed: list[int] = []

    def recording_schedule() -> list[Chunk]:
        chunks = schedule()
        catching_up = [chunk for chunk in chunks if chunk.num_tokens > 1]
        if len(catching_up) < len(chunks):
            rationed.append(sum(c.num_tokens for c in catching_up if c.sequence.is_recomputing))
        return chunks

    monkeypatch.setattr(engine._scheduler, "schedule", recording_schedule)
    generate(engine, *(request(prompt(30, seed), 60) for seed in range(4)))
    assert max(rationed) == 8


def test_seeded_output_is_the_same_alone_among_others_and_resumed(engine, reference):
    ids = prompt(21)
    (alone,) = generate(engine, request(ids, sampling=DRAWING))
    others = [request(prompt(n, 5), sampling=replace(DRAWING, seed=n)) for n in range(1, 60, 4)]
    assert generate(engine, request(ids, sampling=DRAWING), *others)[0] == alone
    assert generate(engine, request(ids, known=alone[:7], sampling=DRAWING)) == [alone[7:]]
    assert generate(engine, request(ids, sampling=replace(DRAWING, seed=12)))[0] != alone
    reference("llama").assert_follows(
        ids,
        generate(engine, request(ids, sampling=replace(DRAWING, top_p=1.0)))[0],
        replace(DRAWING, top_p=1.0),
    )


def test_output_among_sixty_equals_output_alone(make_engine):
    engine = make_engine(num_blocks=512, max_num_batched_tokens=512)
    prompts = [prompt(1 + 3 * n % 70, n) for n in range(60)]
    alone = [generate(engine, request(ids, 12))[0] for ids in prompts]
    storm = make_engine(num_blocks=512, max_num_batched_tokens=512)
    assert generate(storm, *(request(ids, 12) for ids in prompts)) == alone


@pytest.mark.parametrize("num_steps", range(6))
def test_cancel_at_any_step_returns_every_block(num_steps, make_engine, reference):
    engine = make_engine(max_num_batched_tokens=24)
    cancelled, other = request(prompt(50)), request(prompt(20))
    engine.add(cancelled)
    engine.add(other)
    for _ in range(num_steps):
        engine.step()
    assert engine.cancel(cancelled.sequence_id)
    assert not engine.cancel(cancelled.sequence_id)
    engine.check_integrity()
    assert cancelled.sequence_id not in drain(engine)
    assert generate(engine, request(prompt(50))) == [reference("llama").generate(prompt(50), 20)]


@pytest.mark.parametrize("num_steps", range(3))
def test_cancel_of_a_holding_sequence_leaves_its_blocks_until_they_are_released(num_steps, make_engine):
    engine = make_engine(max_num_batched_tokens=24)
    item = request(prompt(50), until=Until.FIRST_TOKEN, hold_blocks=True)
    engine.add(item)
    for _ in range(num_steps):
        engine.step()
    engine.cancel(item.sequence_id)
    assert engine.snapshot().blocks_used == (4 if num_steps else 0)
    assert engine.release_hold(item.sequence_id)
    assert engine.snapshot().blocks_used == 0


def test_a_new_sequence_waits_behind_a_preempted_one_even_where_it_would_fit(make_engine):
    engine = make_engine(num_blocks=8)
    preempt(engine)
    small = request(prompt(1), 1)
    engine.add(small)
    while small.sequence_id not in {output.sequence_id for output in engine.step().outputs}:
        pass
    assert not engine._scheduler.preempted
    drain(engine)


def test_holding_sequences_are_not_preempted(make_engine):
    engine = make_engine(num_blocks=10, max_num_batched_tokens=16)
    growing = request(prompt(30), 80)
    engine.add(growing)
    engine.step()
    engine.step()
    held = request(prompt(80), until=Until.FIRST_TOKEN, hold_blocks=True)
    engine.add(held)
    engine.step()
    table = engine.block_table(held.sequence_id)
    assert len(table) == 5
    for _ in range(70):
        engine.step()
        assert engine.block_table(held.sequence_id) == table
    assert engine.snapshot().num_preemptions > 0
    assert not engine.step().outputs, "the growing one must wait"
    engine.release_hold(held.sequence_id)
    drain(engine)


def test_one_that_will_hold_its_blocks_is_not_preempted_while_its_prompt_is_computed(make_engine):
    """Some of them are on their way to another worker already."""
    engine = make_engine(num_blocks=8, max_num_batched_tokens=4)
    growing = request(prompt(30), 40)
    engine.add(growing)
    while not any(output.new_tokens for output in engine.step().outputs):
        pass
    held = request(prompt(80), until=Until.FIRST_TOKEN, hold_blocks=True)
    engine.add(held)
    engine.step()
    table = engine.block_table(held.sequence_id)
    assert len(table) == 5
    while engine.snapshot().num_preemptions == 0:
        assert held.sequence_id in engine._scheduler.running
        engine.step()
        assert engine.block_table(held.sequence_id) == table
    assert growing.sequence_id in {sequence.sequence_id for sequence in engine._scheduler.preempted}
    engine.release_hold(held.sequence_id)
    drain(engine)


def test_what_can_never_fit_is_refused_at_once(make_engine):
    engine = make_engine(num_blocks=8, max_model_len=100)
    assert engine.limits.max_sequence_tokens == 100
    for item in (
        request(prompt(101), 1),
        request(prompt(90), 11),
        request((), 5),
        request((5, 512), 5),
        request((5, -1), 5),
        request(prompt(5), 2, known=(1, 2)),
    ):
        with pytest.raises(CannotFit):
            engine.add(item)
    small = make_engine(num_blocks=4)
    with pytest.raises(CannotFit):
        small.add(request(prompt(4 * BLOCK), 1))
    assert len(generate(small, request(prompt(4 * BLOCK - 1), 1))[0]) == 1


def test_two_that_fit_only_one_after_the_other_both_finish(make_engine):
    engine = make_engine(num_blocks=6)
    first, second = request(prompt(70), 20), request(prompt(70, 1), 20)
    engine.add(first)
    engine.add(second)
    seen: list[str] = []
    while engine.has_work:
        seen += [output.sequence_id for output in engine.step().outputs]
    assert [key for key, _ in itertools.groupby(seen)] == [first.sequence_id, second.sequence_id]


def test_new_ones_are_served_in_order_and_none_passes_a_waiting_one(make_engine):
    engine = make_engine(num_blocks=6, max_num_batched_tokens=512)
    big = [request(prompt(60, n), 10) for n in range(2)]
    small = request(prompt(3), 2)
    for item in (*big, small):
        engine.add(item)
    outputs = engine.step().outputs
    assert [output.sequence_id for output in outputs] == [big[0].sequence_id]
    drain(engine)


def test_no_more_run_at_once_than_allowed(make_engine):
    engine = make_engine(max_num_seqs=3)
    for n in range(7):
        engine.add(request(prompt(4, n), 6))
    while engine.has_work:
        engine.step()
        assert engine.snapshot().num_running <= 3


def test_a_step_never_computes_more_tokens_than_its_budget(make_engine):
    engine = make_engine(max_num_batched_tokens=20, max_num_seqs=64)
    assert engine.limits.max_num_seqs == 20
    for n in range(30):
        engine.add(request(prompt(1 + 7 * n % 40, n), 8))
    computed: dict[str, int] = {}
    while engine.has_work:
        outputs = engine.step().outputs
        grown = sum(o.num_computed_tokens - computed.get(o.sequence_id, 0) for o in outputs)
        assert grown <= 20 + sum(o.prefill.cached_tokens for o in outputs if o.prefill is not None)
        computed |= {o.sequence_id: o.num_computed_tokens for o in outputs}


def test_a_sequence_whose_logits_break_fails_alone_and_poisons_no_cache(make_engine, reference):
    engine = make_engine(max_num_batched_tokens=512)
    broken, healthy = request(prompt(40), 20), request(prompt(33), 20)
    engine.add(broken)
    engine.add(healthy)
    engine.step()
    engine.pool.tensor[engine.block_table(broken.sequence_id)[0]] = float("nan")
    outputs = drain(engine)
    last = outputs[broken.sequence_id][-1]
    assert last.error is not None
    assert last.is_last
    assert not last.new_tokens
    healthy_ids = [t.token_id for o in outputs[healthy.sequence_id] for t in o.new_tokens]
    assert healthy_ids == reference("llama").generate(prompt(33), 20)[1:]
    assert generate(engine, request(prompt(40))) == [reference("llama").generate(prompt(40), 20)]


def test_a_step_that_raises_fails_its_sequences_and_the_next_one_works(engine, reference, monkeypatch):
    item = request(prompt(20))
    engine.add(item)
    with monkeypatch.context() as patch:
        patch.setattr("engine.runner.ModelRunner.run", _explode)
        (output,) = engine.step().outputs
    assert output.error == "the model failed: out of smoke"
    assert not engine.has_work
    assert generate(engine, request(prompt(20))) == [reference("llama").generate(prompt(20), 20)]


def _explode(*_: object) -> None:
    raise RuntimeError("out of smoke")


def test_counters_tell_prefill_from_decode(engine):
    generate(engine, request(prompt(40), 10))
    load = engine.snapshot()
    assert load.tokens_prefilled == 40
    assert load.tokens_decoded == 9
    generate(engine, request(prompt(40), 10))
    assert engine.snapshot().tokens_prefilled == 40 + 8


def test_tables_do_not_grow_with_unique_prompts(make_engine):
    engine = make_engine(num_blocks=32, max_num_batched_tokens=512)
    for n in range(20):
        generate(engine, *(request(prompt(20 + n % 30, 100 * n + i), 2) for i in range(8)))
    assert not engine._living
    assert not engine._held
    assert engine._scheduler.num_living == 0
    assert len(engine._blocks._by_hash) <= 32


@pytest.mark.full
def test_memory_does_not_grow_with_unique_prompts(make_engine):
    engine = make_engine(max_num_batched_tokens=512, poison_blocks=False)

    def run(num_rounds: int) -> int:
        for _ in range(num_rounds):
            generate(engine, *(request(prompt(20, next(seeds)), 1) for _ in range(50)))
        return psutil.Process().memory_info().rss

    seeds = itertools.count()
    warm = run(40)
    assert run(160) - warm < 8 * 2**20, "10,000 unique prompts, 8,000 of them measured"


def test_only_legal_moves_of_a_sequence_are_possible():
    sequence = Sequence(request(prompt(3)), 0, 0.0)
    with pytest.raises(IntegrityError):
        sequence.move(SequenceState.PREEMPTED)
    sequence.move(SequenceState.RUNNING)
    sequence.move(SequenceState.PREEMPTED)
    sequence.move(SequenceState.CANCELLED)
    with pytest.raises(IntegrityError):
        sequence.move(SequenceState.RUNNING)


def test_logprobs_come_with_the_tokens(engine, reference):
    ids = prompt(12)
    engine.add(item := request(ids, 3, sampling=SamplingParams(num_logprobs=2)))
    tokens = tokens_of(drain(engine)[item.sequence_id])
    expected = torch.log_softmax(reference("llama").scores([*ids, *(t.token_id for t in tokens)]), -1)
    for token in tokens:
        row = expected[len(ids) - 1 + token.position]
        assert token.logprobs is not None
        assert token.logprobs.chosen.logprob == pytest.approx(float(row[token.token_id]), abs=1e-4)
        assert [t.token_id for t in token.logprobs.top] == row.topk(2).indices.tolist()
