from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from engine.engine import Engine
from engine.errors import GrammarError
from engine.grammar import Grammar, Matcher, without
from engine.guidance import Grammars
from engine.request import SequenceRequest
from engine.sampler import GREEDY, SampleRow, sample
from engine.sampling import FinishReason, SamplingParams, StopConditions
from engine.sequence import Sequence
from engine.speculation import Speculator
from pdserve.v1 import generation_pb2
from pdserve.v1.structured import grammar_text
from tests.grammars import CONSTRAINTS, Constraint
from tests.models import END_OF_TEXT, IM_END
from tests.unit.engine.conftest import MakeEngine
from tests.unit.engine.driving import drain, generate, hand_over, prefill, prompt, request, reserve, tokens_of

A, B, C = 64, 65, 66
TIMEOUT_S = 30
EVERY = pytest.mark.parametrize("name", CONSTRAINTS)


def grammar(engine: Engine, constraint: Constraint | str, known: tuple[int, ...] = ()) -> Grammar:
    """A string is a regular expression."""
    if isinstance(constraint, str):
        constraint = Constraint("regex", constraint, bool)
    return engine.grammars.prepare(grammar_text(constraint.message()), known).result(TIMEOUT_S)


def asked(
    engine: Engine, constraint: Constraint | str, seed: int = 0, max_tokens: int = 160, **stop: object
) -> SequenceRequest:
    made = request(
        prompt(9 + seed),
        sampling=SamplingParams(temperature=1.0, seed=seed),
        grammar=grammar(engine, constraint),
    )
    return replace(made, stop=replace(StopConditions(max_tokens), **stop))


def text_of(engine: Engine, token_ids: list[int]) -> str:
    tokenizer = Tokenizer.from_file(str(engine.model.folder / "tokenizer.json"))
    return tokenizer.decode(token_ids)


def possible(mask: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist())


@EVERY
def test_what_comes_out_is_what_was_asked_for(engine: Engine, name: str) -> None:
    constraint = CONSTRAINTS[name]
    items = [asked(engine, constraint, seed) for seed in range(6)]
    free = request(prompt(21), 40)
    *constrained, beside = generate(engine, *items, free)
    for token_ids in constrained:
        assert token_ids[-1] in (END_OF_TEXT, IM_END), text_of(engine, token_ids)
        assert constraint.holds(text_of(engine, token_ids)), text_of(engine, token_ids)
    assert len({tuple(token_ids) for token_ids in constrained}) > 2
    (alone,) = generate(engine, request(prompt(21), 40))
    assert beside == alone


def test_a_grammar_changes_no_draw_that_it_allows(engine: Engine) -> None:
    """All of ASCII and more is allowed: the same tokens come as without, as long as they are text."""
    item = replace(asked(engine, r"(.|\n)*", max_tokens=12), grammar=None)
    (free,) = generate(engine, item)
    whole = [token_id for token_id in free if token_id < 94]
    (constrained,) = generate(engine, replace(asked(engine, r"(.|\n)*", max_tokens=12), sequence_id="x"))
    num_same = next((i for i, token_id in enumerate(free) if token_id not in whole), len(free))
    assert constrained[:num_same] == free[:num_same]


def test_eos_may_come_where_the_text_is_whole_and_must_where_nothing_else_can(engine: Engine) -> None:
    matcher = grammar(engine, "ab?").begin()
    assert possible(matcher.masks()[0]) == {A, 94 + 162 + 1}  # "a" and "ab"
    matcher.append(A)
    assert possible(matcher.masks()[0]) == {B, END_OF_TEXT, IM_END}
    matcher.append(B)
    assert possible(matcher.masks()[0]) == {END_OF_TEXT, IM_END}
    assert matcher.error is None


def test_masks_behind_drafts_leave_the_matcher_where_it_was(engine: Engine) -> None:
    matcher = grammar(engine, "a(b|x)c").begin()
    before = [possible(mask) for mask in matcher.masks()]
    masks = matcher.masks([A, B])
    assert possible(masks[1]) >= {B}
    assert possible(masks[2]) == {C}
    assert [possible(mask) for mask in matcher.masks()] == before
    assert matcher.num_possible([A, B, C, A]) == 3
    assert matcher.num_possible([A, B, C, IM_END, A]) == 3  # an end is no draft
    assert matcher.num_possible([B]) == 0
    assert matcher.error is None


@pytest.mark.parametrize(
    "stop", [{"min_tokens": 50}, {"ignore_eos": True}, {"min_tokens": 50, "ignore_eos": True}]
)
def test_the_grammars_end_goes_before_min_tokens_and_ignore_eos(
    engine: Engine, stop: dict[str, object]
) -> None:
    """They put the end off where the grammar can go on, and cannot where it cannot."""
    item = asked(engine, "(a|b|c){3,9}", **stop)
    engine.add(item)
    outputs = drain(engine)[item.sequence_id]
    token_ids = [token.token_id for token in tokens_of(outputs)]
    assert len(text_of(engine, token_ids)) == 9
    assert outputs[-1].finish_reason is FinishReason.EOS


def test_max_tokens_cuts_a_text_off(engine: Engine) -> None:
    item = asked(engine, CONSTRAINTS["schema"], max_tokens=4)
    engine.add(item)
    (*_, last) = drain(engine)[item.sequence_id]
    assert last.finish_reason is FinishReason.LENGTH


def test_a_stop_id_that_the_grammar_wants_too_early_is_no_end(engine: Engine) -> None:
    """Nothing else could be drawn."""
    (token_ids,) = generate(engine, asked(engine, "c1c", stop_token_ids=frozenset({C}), min_tokens=3))
    assert text_of(engine, token_ids) == "c1c"


def test_bans_are_taken_out_of_a_mask_unless_nothing_is_left() -> None:
    mask = np.array([0b1010, 0, 0b1], np.uint8)
    assert possible(without(mask, frozenset({1, 5}))) == {3, 16}
    assert possible(without(mask, frozenset({1, 3, 16}))) == {1, 3, 16}
    assert possible(mask) == {1, 3, 16}


@EVERY
def test_a_sequence_goes_on_with_its_grammar_behind_known_tokens(engine: Engine, name: str) -> None:
    constraint = CONSTRAINTS[name]
    whole = asked(engine, constraint, seed=3)
    (token_ids,) = generate(engine, whole)
    for num_known in (1, len(token_ids) // 2, len(token_ids) - 1):
        known = tuple(token_ids[:num_known])
        rest = request(
            whole.prompt_token_ids,
            known=known,
            sampling=whole.sampling,
            grammar=grammar(engine, constraint, known),
        )
        (others,) = generate(engine, replace(rest, stop=whole.stop))
        assert [*known, *others] == token_ids


@EVERY
def test_a_hand_over_keeps_the_grammars_state(make_engine: MakeEngine, name: str) -> None:
    source, target = make_engine(), make_engine()
    constraint = CONSTRAINTS[name]
    item = asked(source, constraint, seed=5)
    (alone,) = generate(source, item)
    here = replace(item, grammar=grammar(target, constraint), sequence_id="moved")
    first, _ = hand_over(source, target, here)
    rest = tokens_of(drain(target)["moved"])
    assert [first.token_id, *(token.token_id for token in rest)] == alone


def test_a_first_token_that_is_not_the_grammars_is_refused(make_engine: MakeEngine) -> None:
    source, target = make_engine(), make_engine()
    item = replace(asked(target, "abc"), grammar=grammar(source, "b.*"))
    first, held = prefill(source, item)
    source.release_hold(held.sequence_id)
    reservation = reserve(target, item)
    with pytest.raises(ValueError, match="grammar"):
        target.add_computed(replace(item, grammar=grammar(target, "abc")), reservation, first)
    target.release_reservation(reservation)


def test_known_tokens_that_are_not_the_grammars_are_refused(engine: Engine) -> None:
    with pytest.raises(GrammarError, match="known output"):
        grammar(engine, "abc", (A, C))


def test_sequences_survive_preemption_with_their_grammars(make_engine: MakeEngine) -> None:
    big, small = make_engine(num_blocks=400), make_engine(num_blocks=14, block_size=8)
    constraint = CONSTRAINTS["schema"]
    expected = generate(big, *[asked(big, constraint, seed) for seed in range(5)])
    items = [asked(small, constraint, seed, max_tokens=90) for seed in range(5)]
    assert generate(small, *items) == expected
    assert small.snapshot().num_preemptions > 0


class Guessing:
    """The answer itself, with something else now and then."""

    def __init__(self, answers: dict[int, list[int]]) -> None:
        self._answers = answers

    def propose(self, sequence: Sequence, num_tokens: int) -> list[int]:
        begin = sequence.num_output_tokens
        answer = [*self._answers[sequence.request.sampling.seed], C, C, C]
        guess = answer[begin : begin + num_tokens]
        if begin % 4 == 2:
            guess[-1] = (guess[-1] + 1) % 500
        return guess

    def forget(self, sequence_id: str) -> None:
        pass


@EVERY
def test_speculation_gives_the_same_tokens_under_a_grammar(
    make_engine: MakeEngine, loaded: object, name: str
) -> None:
    constraint = CONSTRAINTS[name]
    plain = make_engine()
    answers = dict(enumerate(generate(plain, *[asked(plain, constraint, seed) for seed in range(4)])))
    fast = make_engine(speculative={"method": "ngram"})
    speculator = Speculator(Guessing(answers), 4, row_cost=1e-300)
    fast._speculator = fast._scheduler._speculator = speculator
    outputs = generate(fast, *[asked(fast, constraint, seed) for seed in range(4)])
    assert dict(enumerate(outputs)) == answers
    assert fast.snapshot().accepted_draft_tokens > 4


@pytest.mark.parametrize(
    ("constraint", "complaint"),
    [
        (Constraint("regex", "(", bool), "unclosed group"),
        (Constraint("json_schema", '{"type": "objekt"}', bool), "objekt"),
        (Constraint("json_schema", '{"not": {}}', bool), "not"),
        (Constraint("json_schema", "false", bool), "Unsatisfiable"),
        (Constraint("grammar", "start: nowhere", bool), "nowhere"),
    ],
)
def test_what_is_no_grammar_is_refused_in_words(
    engine: Engine, constraint: Constraint, complaint: str
) -> None:
    with pytest.raises(GrammarError, match=complaint):
        grammar(engine, constraint)


def test_a_model_without_eos_has_no_grammars(engine: Engine) -> None:
    grammars = Grammars(engine.model.folder / "tokenizer.json", 512, frozenset())
    with pytest.raises(GrammarError, match="EOS"):
        grammars.prepare(grammar_text(CONSTRAINTS["date"].message())).result(TIMEOUT_S)


FILLING = ".*a.{12}b"


def fill_automata(made: Grammar) -> Matcher:
    """What filled those of FILLING, and came to its end by that."""
    filling = made.begin()
    for token_id in np.random.default_rng(1).integers(64, 90, 2000).tolist():
        filling.append(token_id)
        filling.masks()
        if filling.error is not None:
            break
    assert "too many states" in (filling.error or "")
    return filling


def test_one_sequence_that_fills_the_automata_does_not_break_the_next(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies share them: the next one begins anew, and what it says is right."""
    monkeypatch.setattr("engine.guidance._MAX_LEXER_STATES", 200)
    made = grammar(engine, FILLING)
    filling = fill_automata(made)
    assert not possible(filling.masks()[0])
    other = made.begin()
    assert other.error is None
    other.append(A)
    assert {A, B, C} <= possible(other.masks()[0])


def test_one_sequence_that_fills_the_automata_does_not_break_anothers_hand_over(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks were reserved, and its grammar made, when there was still room."""
    monkeypatch.setattr("engine.guidance._MAX_LEXER_STATES", 200)
    source, target = make_engine(), make_engine()
    item = asked(source, FILLING, seed=5, max_tokens=4)
    (alone,) = generate(source, item)
    here = replace(item, grammar=grammar(target, FILLING), sequence_id="moved")
    fill_automata(grammar(target, FILLING))
    first, _ = hand_over(source, target, here)
    rest = tokens_of(drain(target)["moved"])
    assert [first.token_id, *(token.token_id for token in rest)] == alone


def test_a_sequence_whose_grammar_breaks_is_refused_and_others_go_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    item, other = asked(engine, CONSTRAINTS["schema"]), request(prompt(20), 30)
    monkeypatch.setattr("engine.guidance.FREE_MASK_S", 0.0)
    monkeypatch.setattr("engine.guidance.MAX_MEAN_MASK_S", 0.0)
    engine.add(item)
    engine.add(other)
    outputs = drain(engine)
    (*_, last) = outputs[item.sequence_id]
    assert last.is_refused
    assert "too long" in (last.error or "")
    assert len(tokens_of(outputs[other.sequence_id])) == 30


def test_every_way_to_draw_keeps_to_what_the_grammar_left(engine: Engine) -> None:
    constraint = CONSTRAINTS["words"]
    for params in (
        SamplingParams(temperature=1.3, seed=1, top_k=2),
        SamplingParams(temperature=1.0, seed=2, top_p=0.3, repetition_penalty=1.4),
        SamplingParams(temperature=1.0, seed=3, min_p=0.2, logit_bias=((IM_END, 100.0), (C, 5.0))),
        SamplingParams(presence_penalty=1.0, frequency_penalty=1.0, num_logprobs=3),
        SamplingParams(),
    ):
        (token_ids,) = generate(engine, replace(asked(engine, constraint), sampling=params))
        assert constraint.holds(text_of(engine, token_ids))


def test_of_rows_with_and_without_a_mask_each_gets_its_own() -> None:
    dice = np.random.default_rng(2)
    logits = torch.from_numpy(dice.standard_normal((3, 61), np.float32))
    mask = dice.integers(0, 256, 12, np.uint8)
    allowed = sorted(token_id for token_id in possible(mask) if token_id < 61)
    rows = [SampleRow(SamplingParams(), 0), SampleRow(SamplingParams(), 0, mask=mask), GREEDY]
    for each in ([0, 1, 2], [1, 1], [2, 1, 0, 1]):
        drawn = sample(logits[each], [rows[i] for i in each])
        for i, token in zip(each, drawn, strict=True):
            best = max(allowed, key=lambda k: float(logits[1, k])) if i == 1 else int(logits[i].argmax())
            assert token.token_id == best
    nothing = SampleRow(SamplingParams(temperature=1.0), 0, mask=np.zeros(12, np.uint8))
    assert sample(logits[:1], [nothing])[0].token_id is None


def test_a_vocabulary_with_byte_fallback_has_grammars_too(tmp_path: Path) -> None:
    """As llama 2 and mistral have: a space is "▁", and what is no piece is spelt in bytes."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["<unk>", "<s>", "</s>", *bytes_, "▁", *map(chr, range(33, 127)), "▁b", "ye"]
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    merges = [("▁", "b"), ("y", "e")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    spelling = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(spelling)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    grammars = Grammars(tmp_path / "tokenizer.json", 400, frozenset({2}))
    text = grammar_text(generation_pb2.StructuredOutput(regex="(yes|a b|ü)"))
    matcher = grammars.prepare(text).result(TIMEOUT_S).begin()
    first = {"y", "ye", "<0x79>", "a", "<0x61>", "<0xC3>"}
    assert {pieces[token_id] for token_id in possible(matcher.masks()[0])} == first
    for piece in ("a", "▁b"):
        matcher.append(vocab[piece])
    assert possible(matcher.masks()[0]) == {2}


def test_a_grammar_that_takes_long_to_compile_is_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.guidance.MAX_COMPILE_S", 0.0)
    with pytest.raises(GrammarError, match="too long to compile"):
        grammar(engine, CONSTRAINTS["date"])


def test_only_the_grammars_used_last_are_kept(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_one = Grammars.matcher
    monkeypatch.setattr(
        Grammars, "matcher", lambda self, text: compiled.append(text) or compile_one(self, text)
    )
    monkeypatch.setattr("engine.guidance._NUM_CACHED", 2)
    for regex in ("a", "b", "a", "c", "a", "b"):
        grammar(engine, regex)
    assert [grammar_text(generation_pb2.StructuredOutput(regex=each)) for each in "abcb"] == compiled


def test_any_object_parses(engine: Engine) -> None:
    """`json_object`: nothing keeps it short, so some are cut off; those that end are JSON."""
    anything = Constraint("json_schema", '{"type": "object"}', bool)
    biased = SamplingParams(temperature=1.0, logit_bias=tuple((i, 6.0) for i in (1, 90, 92, 27, 14)))
    items = [replace(asked(engine, anything, s), sampling=replace(biased, seed=s)) for s in range(6)]
    ended = [ids for ids in generate(engine, *items) if ids[-1] in (IM_END, END_OF_TEXT)]
    assert ended
    for token_ids in ended:
        assert isinstance(json.loads(text_of(engine, token_ids)), dict)
