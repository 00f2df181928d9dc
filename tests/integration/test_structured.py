"""Structured output through router, prefill and decode worker: every answer is what was asked for, and the
same one after preemption, with drafts, and when a decode worker is lost in the middle of it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
from llguidance import LLMatcher

import engine.engine
from engine.config import ModelConfig
from engine.engine import Engine
from engine.guidance import Grammars
from engine.loading import LoadedModel, load_model
from engine.request import StepResult
from engine.sequence import Sequence
from engine.speculation import Speculator
from pdserve.client import Client, FinishReason, Generation, InvalidArgument
from pdserve.requests import GenerateOptions
from tests.grammars import CONSTRAINTS, PERSON, Constraint, is_person
from tests.integration.router.harness import until
from tests.models import tiny_model
from tests.serving import TransportName, serving
from tests.unit.engine.driving import prompt
from worker.identity import Role

NUM_BEFORE = 6  # tokens that a worker draws before it is lost
NUM_SEEDS = 3
PLAIN: GenerateOptions = {"max_tokens": 30, "seed": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(ModelConfig(id=str(folder), device="cpu", dtype="float32"))


async def ask(client: Client, constraint: Constraint, seed: int, **more: object) -> Generation:
    options: dict[str, object] = {**constraint.options, "seed": seed, **more}
    return await client.generate(prompt(30 + seed), **options)  # type: ignore[arg-type]


async def ask_all(client: Client) -> list[Generation]:
    """Each constraint with several seeds, and one request beside them that is free."""
    asking = [ask(client, each, seed) for each in CONSTRAINTS.values() for seed in range(NUM_SEEDS)]
    return await asyncio.gather(*asking, client.generate(prompt(40), **PLAIN))


def check(answers: Iterable[Generation]) -> None:
    constraints = [each for each in CONSTRAINTS.values() for _ in range(NUM_SEEDS)]
    for constraint, answer in zip(constraints, answers, strict=False):
        assert answer.finish_reason is FinishReason.EOS, answer.text
        assert constraint.holds(answer.text), answer.text


def tokens(answers: Iterable[Generation]) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in answers]


@pytest.fixture(scope="module")
def expected(folder: Path, loaded: LoadedModel) -> list[tuple[int, ...]]:
    """What one worker draws that has the model to itself, one request after the other."""

    async def alone() -> list[tuple[int, ...]]:
        async with serving(folder, loaded, [Role.COLOCATED], num_blocks=400, max_num_seqs=1) as cluster:
            answers = await ask_all(cluster.client)
        check(answers)
        return tokens(answers)

    return asyncio.run(alone())


@pytest.mark.parametrize("transport", ["grpc", "shm"])
async def test_every_answer_is_what_was_asked_for(
    folder: Path, loaded: LoadedModel, expected: list[tuple[int, ...]], transport: TransportName
) -> None:
    async with serving(folder, loaded, transport=transport, num_blocks=400) as cluster:
        answers = await ask_all(cluster.client)
    check(answers)
    assert tokens(answers) == expected
    assert len(set(expected)) == len(expected)


async def test_answers_survive_being_thrown_out_every_few_tokens(
    folder: Path, loaded: LoadedModel, expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(folder, loaded, num_blocks=400) as cluster:
        (decode,) = cluster.of(Role.DECODE)
        thrower = decode._loop.engine
        steps, step = itertools.count(1), thrower.step

        def preempting() -> StepResult:
            if next(steps) % 5 == 0:
                for sequence in list(thrower._scheduler.running.values()):
                    thrower._scheduler._preempt(sequence)
            return step()

        monkeypatch.setattr(thrower, "step", preempting)
        answers = await ask_all(cluster.client)
        assert decode.describe().counters.num_preemptions > len(answers)
    assert tokens(answers) == expected


class Stalling:
    """In place of an engine's `step`: nothing runs any more once a sequence has drawn enough."""

    def __init__(self, stalled: Engine) -> None:
        self._engine = stalled
        self._step = stalled.step

    @property
    def has_drawn(self) -> bool:
        return any(each.num_output_tokens >= NUM_BEFORE for each in self._engine._living.values())

    def __call__(self) -> StepResult:
        return StepResult((), 0.0) if self.has_drawn else self._step()


async def test_answers_survive_the_loss_of_a_decode_worker(
    folder: Path, loaded: LoadedModel, expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    roles = [Role.PREFILL, Role.DECODE, Role.DECODE]
    async with serving(folder, loaded, roles, num_blocks=400) as cluster:
        doomed, spare = cluster.of(Role.DECODE)
        cluster.workers.remove(spare)
        await cluster.show()
        await until(lambda: len(cluster.router.table.all()) == 2)
        loop = doomed._loop
        stalling = Stalling(loop.engine)
        monkeypatch.setattr(loop.engine, "step", stalling)
        asking = asyncio.create_task(ask_all(cluster.client))
        await until(lambda: loop.call(lambda _: stalling.has_drawn).result(5), timeout_s=30)
        cluster.workers.append(spare)
        await cluster.ready()
        await doomed.stop()
        cluster.workers.remove(doomed)
        await cluster.show()
        answers = await asking
    check(answers)
    assert tokens(answers) == expected
    assert sum(answer.completions[0].num_resumes for answer in answers) > 0


class Foretelling:
    """Knows every answer by its prompt and seed, and is wrong at every fifth place."""

    def __init__(self, answers: dict[tuple[tuple[int, ...], int], list[tuple[int, ...]]]) -> None:
        self._answers = answers

    def propose(self, sequence: Sequence, num_tokens: int) -> list[int]:
        request, begin = sequence.request, sequence.num_output_tokens
        output = tuple(sequence.token_ids[sequence.num_prompt_tokens :])
        known = self._answers[request.prompt_token_ids, request.sampling.seed]
        answer = next(each for each in known if each[:begin] == output)
        guess = list(answer[begin : begin + num_tokens])
        return [*guess[:-1], (guess[-1] + 1) % 500] if guess and begin % 5 == 4 else guess

    def forget(self, sequence_id: str) -> None:
        pass


async def test_speculation_gives_the_same_answers(
    folder: Path, loaded: LoadedModel, expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: dict[tuple[tuple[int, ...], int], list[tuple[int, ...]]] = {(prompt(40), 4): [expected[-1]]}
    for index, token_ids in enumerate(expected[:-1]):
        seed = index % NUM_SEEDS
        answers.setdefault((prompt(30 + seed), seed), []).append(token_ids)
    proposer = Foretelling(answers)
    monkeypatch.setattr(engine.engine, "make_speculator", lambda _: Speculator(proposer, 5, row_cost=1e-300))
    async with serving(folder, loaded, num_blocks=400, speculative={"method": "ngram"}) as cluster:
        (decode,) = cluster.of(Role.DECODE)
        given = await ask_all(cluster.client)
        assert decode.describe().counters.accepted_draft_tokens > 50
    assert tokens(given) == expected


async def test_n_answers_each_keep_to_the_constraint(folder: Path, loaded: LoadedModel) -> None:
    async with serving(folder, loaded, num_blocks=400) as cluster:
        answer = await ask(cluster.client, CONSTRAINTS["schema"], 1, n=3, logprobs=2, min_tokens=150)
    assert len({each.token_ids for each in answer.completions}) == 3
    for each in answer.completions:
        assert each.finish_reason is FinishReason.EOS
        assert is_person(each.text)


async def test_a_schema_may_be_a_mapping(folder: Path, loaded: LoadedModel) -> None:
    async with serving(folder, loaded, [Role.COLOCATED], num_blocks=400) as cluster:
        answer = await cluster.client.generate(prompt(5), json_schema=PERSON, seed=1, max_tokens=160)
    assert is_person(answer.text)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"regex": "("}, "unclosed group"),
        ({"regex": ""}, "empty"),
        ({"json_schema": "{"}, "not JSON"),
        ({"json_schema": "[" * 5000}, "not JSON"),
        ({"json_schema": {"type": "objekt"}}, "objekt"),
        ({"grammar": "start: nowhere"}, "nowhere"),
        ({"regex": "a" * 70_000}, "70000 bytes"),
        ({"json_schema": {}, "regex": "a"}, "one way only"),
        ({"json_schema": {"a": {1}}}, "json_schema"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_at_once(
    folder: Path, loaded: LoadedModel, options: GenerateOptions, complaint: str
) -> None:
    async with serving(folder, loaded, [Role.COLOCATED]) as cluster:
        with pytest.raises(InvalidArgument, match=complaint):
            await cluster.client.generate([1, 2], **options)
        assert cluster.is_idle()


async def test_a_grammar_too_slow_for_its_neighbours_is_refused_in_the_middle(
    folder: Path, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(folder, loaded, num_blocks=400) as cluster:
        await ask(cluster.client, CONSTRAINTS["schema"], 1)  # compiled before anybody is in a hurry
        monkeypatch.setattr("engine.guidance.FREE_MASK_S", 0.0)
        monkeypatch.setattr("engine.guidance.MAX_MEAN_MASK_S", 0.0)
        refused = ask(cluster.client, CONSTRAINTS["schema"], 1)
        beside = cluster.client.generate(prompt(40), **PLAIN)
        error, answer = await asyncio.gather(refused, beside, return_exceptions=True)
    assert isinstance(error, InvalidArgument)
    assert "too long" in error.message
    assert isinstance(answer, Generation)
    assert len(answer.token_ids) == 30


async def test_others_go_on_while_a_grammar_is_compiled_and_who_leaves_holds_nothing(
    folder: Path, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, compile_one = threading.Event(), Grammars.matcher
    begun: list[str] = []

    def gated(self: Grammars, text: str) -> LLMatcher:
        begun.append(text)
        if not gate.wait(30):
            raise TimeoutError
        return compile_one(self, text)

    monkeypatch.setattr(Grammars, "matcher", gated)
    async with serving(folder, loaded, num_blocks=400) as cluster:
        leaving = asyncio.create_task(ask(cluster.client, CONSTRAINTS["date"], 1))
        staying = asyncio.create_task(ask(cluster.client, CONSTRAINTS["schema"], 2))
        await until(lambda: len(begun) > 0, timeout_s=20)
        answer = await cluster.client.generate(prompt(40), **PLAIN)
        assert len(answer.token_ids) == 30
        leaving.cancel()
        await asyncio.wait([leaving])
        assert not staying.done()
        gate.set()
        assert is_person((await staying).text)


async def test_json_of_any_kind_parses_where_it_ends(folder: Path, loaded: LoadedModel) -> None:
    bias = dict.fromkeys((1, 90, 92, 27, 14), 6.0)
    async with serving(folder, loaded, num_blocks=400) as cluster:
        anything = Constraint("json_schema", '{"type": "object"}', bool)
        asking = [ask(cluster.client, anything, seed, logit_bias=bias) for seed in range(5)]
        answers = await asyncio.gather(*asking)
    whole = [answer.text for answer in answers if answer.finish_reason is FinishReason.EOS]
    assert whole
    for text in whole:
        assert isinstance(json.loads(text), dict)
