"""Drafts change how many tokens a step brings, and nothing else. Right and wrong drafts alike are taken to
the limits of blocks, budgets, lengths and stops, and compared with an engine that drafts nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from pydantic import ValidationError

import engine.engine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.loading import LoadedModel
from engine.request import SequenceOutput, SequenceRequest, Until
from engine.sampling import FinishReason, SamplingParams, StopConditions
from engine.sequence import Sequence
from engine.speculation import MAX_ROWS, Acceptance, Speculator, num_worthwhile
from tests.unit.engine.driving import drain, generate, hand_over, prompt, request, tokens_of

NGRAM = {"method": "ngram", "max_tokens": 6}
SEEDED = SamplingParams(temperature=0.7, top_p=0.9, seed=5)
SAMPLINGS = {
    "greedy": SamplingParams(),
    "seeded": SEEDED,
    "penalties": replace(SEEDED, repetition_penalty=1.1, presence_penalty=0.4, frequency_penalty=0.3),
    "greedy penalties": SamplingParams(repetition_penalty=0.9, presence_penalty=0.8, frequency_penalty=0.4),
    "bias": SamplingParams(temperature=1.0, top_k=5, seed=3, logit_bias=((64, 8.0), (65, 8.0), (66, 8.0))),
    "min_p": SamplingParams(temperature=1.3, min_p=0.3, seed=9),
}


class Scripted:
    """Proposes what `expected` says of a sequence's output, with so large a share of tokens spoiled."""

    def __init__(self, share_wrong: float = 0.0) -> None:
        self.expected: dict[str, list[int]] = {}
        self._share_wrong = share_wrong
        self._dice = random.Random(1)

    def propose(self, sequence: Sequence, num_tokens: int) -> list[int]:
        begin = sequence.num_output_tokens
        # Where the output ends it goes on all the same: nobody may need what lies behind an end.
        known = [*self.expected[sequence.sequence_id][begin : begin + num_tokens], *[7] * num_tokens]
        return [(t + 1) % 512 if self._dice.random() < self._share_wrong else t for t in known[:num_tokens]]

    def forget(self, sequence_id: str) -> None:
        pass


def right() -> Scripted:
    return Scripted()


def wrong() -> Scripted:
    return Scripted(1.0)


def mixed() -> Scripted:
    return Scripted(0.3)


@pytest.fixture
def make_drafting(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Engine]:
    """An engine that takes every draft it has room for, however often they were wrong."""

    def make(proposer: Scripted, family: str = "llama", *, max_tokens: int = 5, **settings: object) -> Engine:
        eager = Speculator(proposer, max_tokens, row_cost=1e-300)
        with monkeypatch.context() as patch:
            patch.setattr(engine.engine, "make_speculator", lambda _: eager)
            return make_engine(family, speculative=NGRAM, **settings)

    return make


def expect(proposer: Scripted, plain: Engine, items: list[SequenceRequest]) -> list[list[int]]:
    """What the items give without drafts, each alone; tells the proposer."""
    outputs = [generate(plain, item)[0] for item in items]
    for item, output in zip(items, outputs, strict=True):
        proposer.expected[item.sequence_id] = [*item.known_token_ids, *output]
    return outputs


def drafts_of(outputs: list[SequenceOutput]) -> list[tuple[int, int]]:
    """Of each step: drafts, and how many were right."""
    return [(o.num_drafts, sum(token.was_drafted for token in o.new_tokens)) for o in outputs]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("make_proposer", [right, wrong, mixed])
def test_drafts_change_no_token(make_proposer, sampling, make_engine, make_drafting):
    proposer = make_proposer()
    items = [request(prompt(length), 40, sampling=sampling) for length in (1, 15, 16, 17, 40, 61)]
    expected = expect(proposer, make_engine(), items)
    drafting = make_drafting(proposer)
    assert generate(drafting, *items) == expected
    load = drafting.snapshot()
    assert load.tokens_decoded == 6 * 39
    assert load.draft_tokens > 100
    if make_proposer is right:
        assert load.accepted_draft_tokens == load.draft_tokens
    elif make_proposer is wrong:
        assert load.accepted_draft_tokens == 0
    else:
        assert 0 < load.accepted_draft_tokens < load.draft_tokens


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "gemma3_text", "gpt_oss"])
def test_drafts_change_no_token_of_any_family(family, make_drafting, reference):
    proposer = mixed()
    items = [request(prompt(length), 40) for length in (3, 16, 45)]
    outputs = [reference(family).generate(item.prompt_token_ids, 40) for item in items]
    proposer.expected = {item.sequence_id: output for item, output in zip(items, outputs, strict=True)}
    drafting = make_drafting(proposer, family)
    assert generate(drafting, *items) == outputs
    assert drafting.snapshot().accepted_draft_tokens > 20


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_ngrams_change_no_token(sampling, make_engine):
    ids = prompt(12) * 3  # something to look up
    items = [request(ids[start:], 60, sampling=sampling) for start in (0, 5, 20)]
    expected = [generate(make_engine(), item)[0] for item in items]
    drafting = make_engine(speculative=NGRAM | {"min_ngram": 1})
    assert generate(drafting, *items) == expected
    assert drafting.snapshot().draft_tokens > 0


def test_text_that_loops_takes_few_steps(make_engine):
    """A bias makes the tiny model draw one token for ever."""
    looping = SamplingParams(logit_bias=((70, 1000.0),))
    drafting = make_engine(speculative=NGRAM)
    drafting.add(item := request(prompt(9), 60, sampling=looping))
    outputs = drain(drafting)[item.sequence_id]
    assert [token.token_id for token in tokens_of(outputs)] == [70] * 60
    assert len(outputs) < 20
    assert max(num_drafts for num_drafts, _ in drafts_of(outputs)) == 6


@pytest.mark.parametrize("make_proposer", [right, wrong, mixed])
@pytest.mark.parametrize(
    "sampling", [SAMPLINGS["greedy"], SAMPLINGS["penalties"]], ids=["greedy", "penalties"]
)
@pytest.mark.parametrize("is_caching", [True, False])
def test_preemption_with_drafts_changes_no_token(
    is_caching, sampling, make_proposer, make_engine, make_drafting
):
    proposer = make_proposer()
    items = [request(prompt(length), 60, sampling=sampling) for length in (20, 31, 16, 3)]
    expected = expect(proposer, make_engine(), items)
    tight = make_drafting(proposer, num_blocks=11, enable_prefix_caching=is_caching, max_recompute_tokens=8)
    for item in items:
        tight.add(item)
    outputs: dict[str, list[int]] = {item.sequence_id: [] for item in items}
    while tight.has_work:
        for output in tight.step().outputs:
            outputs[output.sequence_id] += [token.token_id for token in output.new_tokens]
        tight.check_integrity()
    assert list(outputs.values()) == expected
    assert tight.snapshot().num_preemptions > 0
    assert tight.snapshot().draft_tokens > 0


def test_drafts_preempt_nobody_and_keep_nobody_waiting(make_engine, make_drafting):
    """Wrong drafts take part in every step; who runs when, and who is preempted, is as without them."""
    proposer = wrong()
    items = [request(prompt(length), 50) for length in (20, 31, 16, 3, 40)]
    expect(proposer, make_engine(), items)
    steps = []
    for make in (make_engine, lambda **settings: make_drafting(proposer, **settings)):
        tight = make(num_blocks=11, enable_prefix_caching=False)
        for item in items:
            tight.add(item)
        ran = []
        while tight.has_work:
            ran.append([(o.sequence_id, o.num_computed_tokens) for o in tight.step().outputs])
        steps.append((ran, tight.snapshot().num_preemptions))
    assert steps[0] == steps[1]
    assert steps[0][1] > 0


@pytest.mark.parametrize("make_proposer", [right, wrong])
@pytest.mark.parametrize("block_size", [1, 4])
def test_blocks_of_wrong_drafts_go_back_after_the_step(block_size, make_proposer, make_engine, make_drafting):
    proposer = make_proposer()
    item = request(prompt(9), 30)
    expect(proposer, make_engine(), [item])
    drafting = make_drafting(proposer, block_size=block_size, num_blocks=128)
    drafting.add(item)
    num_tokens = 9
    while drafting.has_work:
        (output,) = drafting.step().outputs
        num_tokens += len(output.new_tokens)
        if not output.is_last:
            table = drafting.block_table(item.sequence_id)
            assert -(-(num_tokens - 1) // block_size) <= len(table) <= -(-num_tokens // block_size)
    assert drafting.snapshot().draft_tokens > 20


def test_only_what_was_right_gets_into_the_prefix_cache(make_engine, make_drafting, reference):
    proposer = mixed()
    item = request(prompt(10), 70)
    (output,) = expect(proposer, make_engine(), [item])
    drafting = make_drafting(proposer)
    generate(drafting, item)
    for end in range(30, 70, 7):
        longer = (*prompt(10), *output[:end])
        again = request(longer, 5)
        proposer.expected[again.sequence_id] = output[end:]
        drafting.add(again)
        outputs = drain(drafting)[again.sequence_id]
        assert outputs[-1].is_last
        assert outputs[0].prefill is not None
        assert outputs[0].prefill.cached_tokens == (len(longer) - 1) // 16 * 16
        assert [token.token_id for token in tokens_of(outputs)] == output[end : end + 5]


def test_a_resumed_and_a_handed_over_sequence_are_drafted_too(make_engine, make_drafting):
    sampling = SAMPLINGS["penalties"]
    proposer = right()
    item = request(prompt(21), 40, sampling=sampling)
    (output,) = expect(proposer, make_engine(), [item])
    resumed = request(prompt(21), 40, known=output[:9], sampling=sampling)
    proposer.expected[resumed.sequence_id] = output
    drafting = make_drafting(proposer)
    assert generate(drafting, resumed) == [output[9:]]
    before = drafting.snapshot().accepted_draft_tokens
    assert before > 20
    first, _ = hand_over(make_engine(), drafting, item)
    tokens = tokens_of(drain(drafting)[item.sequence_id])
    assert [first.token_id, *(token.token_id for token in tokens)] == output
    assert drafting.snapshot().accepted_draft_tokens > before + 20


def test_a_first_token_is_never_drafted_and_a_prefill_sequence_not_at_all(make_engine, make_drafting):
    proposer = right()
    items = [request(prompt(1), 9), request(prompt(1), 9, until=Until.FIRST_TOKEN)]
    expect(proposer, make_engine(), items)
    drafting = make_drafting(proposer)
    for item in items:
        drafting.add(item)
    outputs = drain(drafting)
    assert drafts_of(outputs[items[1].sequence_id]) == [(0, 0)]
    assert drafts_of(outputs[items[0].sequence_id])[0] == (0, 0)
    assert drafting.snapshot().tokens_prefilled == 2


@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_nothing_is_drafted_behind_max_tokens(max_tokens, make_engine, make_drafting):
    proposer = right()
    item = request(prompt(20), max_tokens)
    (expected,) = expect(proposer, make_engine(), [item])
    drafting = make_drafting(proposer)
    drafting.add(item)
    outputs = drain(drafting)[item.sequence_id]
    assert [token.token_id for token in tokens_of(outputs)] == expected
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    # The first token, then 1 + 5 a step.
    assert len(outputs) == 1 + -(-(max_tokens - 1) // 6)
    assert sum(num_drafts for num_drafts, _ in drafts_of(outputs)) == max_tokens - 1 - (len(outputs) - 1)


def test_a_sequence_may_fill_its_pool_to_the_last_slot(make_engine, make_drafting):
    proposer = right()
    item = request(prompt(20), 44)
    (expected,) = expect(proposer, make_engine(num_blocks=4), [item])
    drafting = make_drafting(proposer, num_blocks=4)
    assert generate(drafting, item) == [expected]
    assert drafting.snapshot().accepted_draft_tokens > 30


@pytest.mark.parametrize("position", range(1, 14))
@pytest.mark.parametrize("kind", ["stop id", "eos", "stop id after min_tokens"])
def test_an_end_among_right_drafts_ends_the_sequence_there(kind, position, make_engine, make_drafting):
    ids = prompt(20)
    proposer = right()
    (output,) = expect(proposer, make_engine(), [request(ids, 30)])
    ending = output[position] if kind != "eos" else next(iter(make_engine().model.eos_token_ids))
    bias = SamplingParams() if kind != "eos" else SamplingParams(logit_bias=((ending, 9.0),), temperature=1.0)
    stop = {
        "stop id": StopConditions(30, stop_token_ids=frozenset({ending}), ignore_eos=True),
        "eos": StopConditions(30, min_tokens=position),
        "stop id after min_tokens": StopConditions(
            30, stop_token_ids=frozenset({ending}), min_tokens=position, ignore_eos=True
        ),
    }[kind]
    item = replace(request(ids, sampling=bias), stop=stop)
    plain = make_engine()
    plain.add(item)
    expected = drain(plain)[item.sequence_id]
    proposer.expected[item.sequence_id] = [token.token_id for token in tokens_of(expected)]
    drafting = make_drafting(proposer)
    drafting.add(item)
    outputs = drain(drafting)[item.sequence_id]
    assert tokens_of(outputs)[-1].token_id == tokens_of(expected)[-1].token_id
    assert [t.token_id for t in tokens_of(outputs)] == [t.token_id for t in tokens_of(expected)]
    assert outputs[-1].finish_reason is expected[-1].finish_reason
    assert outputs[-1].num_computed_tokens == expected[-1].num_computed_tokens


def test_logprobs_are_those_of_each_position(make_engine, make_drafting):
    proposer = mixed()
    item = request(prompt(12), 25, sampling=replace(SEEDED, num_logprobs=3))
    plain = make_engine()
    plain.add(item)
    expected = tokens_of(drain(plain)[item.sequence_id])
    proposer.expected[item.sequence_id] = [token.token_id for token in expected]
    drafting = make_drafting(proposer)
    drafting.add(item)
    tokens = tokens_of(drain(drafting)[item.sequence_id])
    for token, wanted in zip(tokens, expected, strict=True):
        assert token.position == wanted.position
        assert token.logprobs is not None
        assert wanted.logprobs is not None
        for one, other in zip(
            (token.logprobs.chosen, *token.logprobs.top),
            (wanted.logprobs.chosen, *wanted.logprobs.top),
            strict=True,
        ):
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_a_step_computes_no_more_tokens_than_its_budget_and_drafts_go_last(make_engine, make_drafting):
    proposer = right()
    items = [request(prompt(length), 20) for length in (3, 4, 5, 6, 50)]
    expected = expect(proposer, make_engine(), items)
    drafting = make_drafting(proposer, max_num_batched_tokens=12)
    run = drafting._runner.run
    rows: list[list[int]] = []

    def counting(step_rows, *others):
        rows.append([len(row.token_ids) for row in step_rows])
        return run(step_rows, *others)

    drafting._runner.run = counting  # type: ignore[method-assign]
    assert generate(drafting, *items) == expected
    assert max(map(sum, rows)) == 12
    assert any(step[4:] == [8] for step in rows), "the long prompt gets all that four leave"


def test_logits_that_break_behind_a_draft_cost_no_token(make_engine, make_drafting, monkeypatch):
    proposer = right()
    item = request(prompt(20), 30)
    (expected,) = expect(proposer, make_engine(), [item])
    drafting = make_drafting(proposer)
    run = drafting._runner.run

    def breaking(*step):
        logits = run(*step).clone()
        logits[2:] = float("nan")
        return logits

    monkeypatch.setattr(drafting._runner, "run", breaking)
    drafting.add(item)
    outputs = drain(drafting)[item.sequence_id]
    assert [token.token_id for token in tokens_of(outputs)] == expected
    assert {len(output.new_tokens) for output in outputs} == {1, 2}


def test_logits_that_break_at_once_fail_the_sequence_and_free_its_drafts(make_engine, make_drafting):
    proposer = right()
    item = request(prompt(20), 40)
    expect(proposer, make_engine(), [item])
    drafting = make_drafting(proposer)
    drafting.add(item)
    drafting.step()
    drafting.pool.tensor[drafting.block_table(item.sequence_id)[0]] = float("nan")
    assert drain(drafting)[item.sequence_id][-1].error is not None
    assert drafting.snapshot().blocks_used == 0


def test_a_step_that_raises_with_drafts_gives_every_block_back(make_engine, make_drafting, monkeypatch):
    proposer = right()
    item = request(prompt(15), 40)
    expect(proposer, make_engine(), [item])
    drafting = make_drafting(proposer)
    drafting.add(item)
    drafting.step()

    def explode(*_):
        raise RuntimeError("out of smoke")

    monkeypatch.setattr(drafting._runner, "run", explode)
    assert drain(drafting)[item.sequence_id][-1].error is not None
    assert drafting.snapshot().blocks_used == 0


@pytest.mark.parametrize("seed", range(6))
def test_random_batches_with_ngrams_equal_those_without(seed, make_engine):
    dice = random.Random(seed)
    settings = {
        "num_blocks": dice.choice([14, 24, 64]),
        "block_size": dice.choice([8, 16]),
        "max_num_seqs": dice.choice([3, 8]),
        "max_num_batched_tokens": dice.choice([9, 48]),
        "max_recompute_tokens": 16,
        "enable_prefix_caching": dice.random() < 0.7,
    }
    items = []
    for n in range(10):
        ids = prompt(dice.choice([4, 9, 16]), dice.randrange(3)) * dice.choice([1, 2, 3])
        stop = StopConditions(
            dice.choice([1, 7, 30, 50]),
            min_tokens=dice.choice([0, 5]),
            stop_token_ids=frozenset(dice.sample(range(508), 6)),
            ignore_eos=dice.random() < 0.5,
        )
        sampling = replace(dice.choice(list(SAMPLINGS.values())), seed=n)
        items.append(replace(request(ids, sampling=sampling), stop=stop))
    expected = [generate(make_engine(num_blocks=128), item)[0] for item in items]
    drafting = make_engine(speculative={"method": "ngram", "min_ngram": 1}, **settings)
    left, outputs = list(items), {item.sequence_id: [] for item in items}
    while drafting.has_work or left:
        if left and dice.random() < 0.3:
            drafting.add(left.pop(0))
        for output in drafting.step().outputs:
            assert output.error is None
            outputs[output.sequence_id] += [token.token_id for token in output.new_tokens]
        drafting.check_integrity()
    assert list(outputs.values()) == expected
    assert drafting.snapshot().draft_tokens > 0


@pytest.mark.parametrize("num_steps", range(1, 5))
def test_cancel_between_steps_with_drafts_returns_every_block(num_steps, make_engine, make_drafting):
    proposer = mixed()
    item = request(prompt(15), 40)
    expect(proposer, make_engine(), [item])
    drafting = make_drafting(proposer)
    drafting.add(item)
    for _ in range(num_steps):
        drafting.step()
    assert drafting.cancel(item.sequence_id)
    assert drafting.snapshot().blocks_used == 0


def test_what_left_is_forgotten(make_engine):
    drafting = make_engine(speculative=NGRAM)
    generate(drafting, *(request(prompt(12) * 2, 30) for _ in range(5)))
    drafting.add(item := request(prompt(12) * 2, 30))
    for _ in range(5):
        drafting.step()
    drafting.cancel(item.sequence_id)
    speculator = drafting._speculator
    assert speculator is not None
    assert not speculator._acceptances
    assert not speculator._proposed
    assert not speculator._proposer._indexes  # type: ignore[attr-defined]


# -- how many ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("probability", "num_rows", "expected"),
    [
        (0.05, 1, 0),
        (0.2, 1, 1),
        (0.5, 1, 3),
        (0.9, 1, 21),
        (0.3, 8, 0),
        (0.5, 8, 1),
        (0.9, 8, 7),
        (0.7, 32, 0),
        (0.9, 32, 2),
    ],
)
def test_fewer_drafts_are_worth_it_where_they_are_wrong_more_often_or_share_a_step(
    probability, num_rows, expected
):
    assert num_worthwhile(probability, num_rows) == expected


def test_acceptance_follows_what_happened_lately():
    acceptance = Acceptance()
    assert acceptance.probability == 0.5
    for _ in range(30):
        acceptance.note([1, 2, 3], [1, 2, 3, 9])
    assert 0.95 < acceptance.probability < 1
    acceptance.note([1, 2, 3], [1])
    acceptance.note([1, 2, 3], [])
    assert acceptance.probability > 0.95
    for _ in range(30):
        acceptance.note([1, 2, 3], [4])
    assert 0 < acceptance.probability < 0.1


class Fixed:
    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.num_asked = 0

    def propose(self, sequence: Sequence, num_tokens: int) -> list[int]:
        self.num_asked += 1
        return self.tokens[:num_tokens]

    def forget(self, sequence_id: str) -> None:
        pass


def test_drafting_stops_where_nothing_is_right_and_begins_again_by_itself():
    speculator = Speculator(Fixed([1, 2, 3, 4]), max_tokens=4)
    sequence = Sequence(request(prompt(3)), 0, 0.0)
    counts = []
    for _ in range(40):
        counts.append(len(speculator.draft(sequence, 9, 1)))
        speculator.note(sequence, [9])
    assert counts[0] > 0
    assert counts[-20:] == [0] * 20
    assert sum(counts) < 30
    num_steps = 0
    while not speculator.draft(sequence, 9, 1):
        speculator.note(sequence, [1])
        num_steps += 1
        assert num_steps < 10
    speculator.forget(sequence.sequence_id)
    assert len(speculator.draft(sequence, 9, 1)) == counts[0]


def test_a_large_step_is_not_even_asked_about():
    proposer = Fixed([1, 2])
    speculator = Speculator(proposer, max_tokens=4)
    sequence = Sequence(request(prompt(3)), 0, 0.0)
    assert speculator.draft(sequence, 9, MAX_ROWS + 1) == []
    assert speculator.draft(sequence, 0, 1) == []
    speculator.note(sequence, [1])
    assert proposer.num_asked == 0


@pytest.mark.parametrize(
    ("speculative", "problem"),
    [
        ({"max_tokens": 3}, "method"),
        ({"method": "draft_model", "max_tokens": 3}, "'ngram'"),
        ({"method": "ngram", "max_tokens": 0}, "max_tokens"),
        ({"method": "ngram", "min_ngram": 5}, "min_ngram 5 is more than max_ngram 4"),
        ({"method": "ngram", "max_token": 5}, "max_token"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(speculative, problem):
    with pytest.raises(ValidationError, match=problem):
        EngineConfig.model_validate({"speculative": speculative})


def test_nothing_is_drafted_unless_it_is_asked_for(loaded: Callable[[str], LoadedModel]):
    plain = Engine(loaded("llama"), EngineConfig(num_blocks=16))
    assert plain._speculator is None
    assert generate(plain, request(prompt(12) * 3, 40, sampling=SamplingParams(logit_bias=((70, 99.0),))))
    assert plain.snapshot().draft_tokens == 0
