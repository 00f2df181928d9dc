"""A decode pool that speculates, through router and workers: the answers are those of one slow process, and
usage and status tell what was guessed.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

import engine.engine
from engine.config import ModelConfig
from engine.loading import LoadedModel, load_model
from engine.sequence import Sequence
from engine.speculation import Speculator
from pdserve.client import Delta, Finished, FinishReason, Generation
from pdserve.v1 import cluster_pb2
from tests.integration.router.harness import until
from tests.integration.test_sampling import Wish, wishes_of
from tests.models import tiny_model
from tests.reference_sampler import ReferenceSampler, seed_of
from tests.serving import Worker, serving
from tests.unit.engine.driving import TIE, Reference, prompt
from worker.identity import Role

NGRAM = {"method": "ngram", "max_tokens": 5, "min_ngram": 1}
# Text of one letter for ever.
LETTER = 64
LOOPING = {"temperature": 0.0, "logit_bias": {LETTER: 1000.0}, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(ModelConfig(id=str(folder), device="cpu", dtype="float32"))


@pytest.fixture(scope="module")
def sampler(folder: Path) -> ReferenceSampler:
    return ReferenceSampler(folder)


@pytest.fixture(scope="module")
def wishes(sampler: ReferenceSampler) -> list[Wish]:
    return wishes_of(sampler, 40)


class Foretelling:
    """Knows every answer, and says something else now and then. What stands behind an answer it makes up."""

    def __init__(self, sampler: ReferenceSampler, wishes: list[Wish]) -> None:
        self._dice = random.Random(3)
        self._answers: dict[tuple[tuple[int, ...], int], list[int]] = {}
        for wish in wishes:
            for index in range(wish.options.get("n", 1)):
                seed = seed_of(wish.options["seed"], index)
                answer = sampler.generate(wish.prompt, {**wish.options, "seed": seed})
                self._answers[wish.prompt, seed] = answer.token_ids

    def propose(self, sequence: Sequence, num_tokens: int) -> list[int]:
        answer = self._answers[sequence.request.prompt_token_ids, sequence.request.sampling.seed]
        known = [*answer, *[LETTER] * num_tokens][sequence.num_output_tokens :][:num_tokens]
        return [token if self._dice.random() < 0.8 else (token + 1) % 512 for token in known]

    def forget(self, sequence_id: str) -> None:
        pass


@pytest.fixture
def foretold(monkeypatch: pytest.MonkeyPatch, sampler: ReferenceSampler, wishes: list[Wish]) -> None:
    """Many drafts, right and wrong, and all of them are tried."""
    proposer = Foretelling(sampler, wishes)
    monkeypatch.setattr(engine.engine, "make_speculator", lambda _: Speculator(proposer, 5, row_cost=1e-300))


def counters_of(worker: Worker) -> cluster_pb2.WorkerCounters:
    return worker.describe().counters


@pytest.mark.usefixtures("foretold")
async def test_each_option_gives_what_one_process_gives(
    folder: Path, loaded: LoadedModel, sampler: ReferenceSampler, wishes: list[Wish]
) -> None:
    async with serving(folder, loaded, speculative=NGRAM) as cluster:
        (decode,) = cluster.of(Role.DECODE)
        (prefill,) = cluster.of(Role.PREFILL)
        assert decode.describe().speculation == "ngram, up to 5 tokens"
        assert prefill.describe().speculation == ""
        for wish in wishes:
            before = counters_of(decode).draft_tokens, counters_of(decode).accepted_draft_tokens
            answer = await wish.ask(cluster.client)
            wish.check(sampler, answer)
            await until(cluster.is_idle)
            _check_counts(answer, decode, before)
        assert counters_of(decode).accepted_draft_tokens > 100
        assert counters_of(decode).draft_tokens > counters_of(decode).accepted_draft_tokens
        assert counters_of(prefill).draft_tokens == 0


def _check_counts(answer: Generation, decode: Worker, before: tuple[int, int]) -> None:
    """The router stops counting where a stop string ends the answer, which the worker learns later."""
    counters, usages = counters_of(decode), [each.usage for each in answer.completions]
    drafted = counters.draft_tokens - before[0], counters.accepted_draft_tokens - before[1]
    told = sum(u.draft_tokens for u in usages), sum(u.accepted_draft_tokens for u in usages)
    if any(each.matched_stop is not None for each in answer.completions):
        assert told[0] <= drafted[0]
        assert told[1] <= drafted[1]
    else:
        assert told == drafted
    assert all(u.accepted_draft_tokens <= min(u.draft_tokens, u.completion_tokens - 1) for u in usages)


@pytest.mark.usefixtures("foretold")
@pytest.mark.parametrize("roles", [(Role.PREFILL, Role.DECODE), (Role.COLOCATED,)], ids=["1P1D", "colocated"])
async def test_options_survive_preemption(
    folder: Path,
    loaded: LoadedModel,
    sampler: ReferenceSampler,
    wishes: list[Wish],
    roles: tuple[Role, ...],
) -> None:
    async with serving(folder, loaded, roles, block_size=4, num_blocks=64, speculative=NGRAM) as cluster:
        answers = await asyncio.gather(*(wish.ask(cluster.client) for wish in wishes))
        (worker,) = (each for each in cluster.workers if each.identity.role is not Role.PREFILL)
        assert counters_of(worker).num_preemptions > 3
        assert counters_of(worker).accepted_draft_tokens > 50
    for wish, answer in zip(wishes, answers, strict=True):
        wish.check(sampler, answer)


async def test_as_it_ships_it_guesses_well_and_stops_guessing(
    folder: Path, loaded: LoadedModel, sampler: ReferenceSampler, wishes: list[Wish]
) -> None:
    async with serving(folder, loaded, speculative=NGRAM) as cluster:
        (decode,) = cluster.of(Role.DECODE)
        for wish in wishes:
            wish.check(sampler, await wish.ask(cluster.client))
        mixed = counters_of(decode).accepted_draft_tokens / counters_of(decode).draft_tokens
        answer = await cluster.client.generate(prompt(9), max_tokens=90, **LOOPING)
        usage = answer.usage
        assert usage.accepted_draft_tokens / usage.draft_tokens > max(0.9, mixed)
        assert usage.accepted_draft_tokens > 60


async def test_a_stop_string_in_the_middle_of_a_step_ends_the_answer_and_its_usage_there(
    folder: Path, loaded: LoadedModel
) -> None:
    async with serving(folder, loaded, speculative=NGRAM) as cluster:
        whole = await cluster.client.generate(prompt(9), max_tokens=60, **LOOPING)
        assert set(whole.token_ids) == {LETTER}
        letter = whole.text[0]
        assert whole.text == letter * 60
        for length in range(20, 27):
            stop = letter * length
            answer = await cluster.client.generate(
                prompt(9), max_tokens=60, stop=stop, include_stop_in_output=length % 2 == 0, **LOOPING
            )
            assert answer.text == (stop if length % 2 == 0 else "")
            assert answer.finish_reason is FinishReason.STOP
            assert answer.completions[0].matched_stop == stop
            assert answer.token_ids == (LETTER,) * length
            assert answer.usage.completion_tokens == length
            assert answer.usage.accepted_draft_tokens < length


async def test_a_stream_gets_the_tokens_of_a_step_in_order(folder: Path, loaded: LoadedModel) -> None:
    async with serving(folder, loaded, speculative=NGRAM) as cluster:
        deltas: list[Delta] = []
        finished: list[Finished] = []
        async for event in cluster.client.generate_stream(
            prompt(9),
            max_tokens=50,
            logprobs=1,
            temperature=0.0,
            logit_bias={LETTER: 1000.0},
            ignore_eos=True,
        ):
            deltas += [event] if isinstance(event, Delta) else []
            finished += [event] if isinstance(event, Finished) else []
        assert sum(len(delta.token_ids) for delta in deltas) == 50
        assert max(len(delta.token_ids) for delta in deltas) > 1
        assert all(
            [each.chosen.token_id for each in delta.logprobs] == list(delta.token_ids) for delta in deltas
        )
        assert finished[0].usage.completion_tokens == 50


async def test_losing_the_decode_worker_changes_no_token_and_no_count_is_lost(
    folder: Path, loaded: LoadedModel
) -> None:
    reference = Reference(folder)
    text = prompt(12) * 3
    looping = {"temperature": 0.0, "logit_bias": {LETTER: 1000.0, LETTER + 1: 1000.0}, "ignore_eos": True}
    roles = [Role.PREFILL, Role.DECODE, Role.DECODE]
    async with serving(folder, loaded, roles, num_blocks=100, speculative=NGRAM) as cluster:
        doomed = cluster.of(Role.DECODE)[0]
        asking = [
            asyncio.create_task(cluster.client.generate(text[start:], max_tokens=200, **looping))
            for start in range(4)
        ]
        await until(lambda: counters_of(doomed).tokens_decoded > 40)
        await doomed.stop()
        cluster.workers.remove(doomed)
        await cluster.show()
        answers = await asyncio.gather(*asking)
    assert sum(answer.completions[0].num_resumes for answer in answers) > 0
    for start, answer in enumerate(answers):
        assert len(answer.token_ids) == 200
        logits = reference.scores([*text[start:], *answer.token_ids])[len(text) - start - 1 : -1]
        assert set(answer.token_ids) <= {LETTER, LETTER + 1}
        best = logits[:, LETTER : LETTER + 2]
        for token_id, pair in zip(answer.token_ids, best.tolist(), strict=True):
            assert pair[token_id - LETTER] > max(pair) - TIE
        assert 0 < answer.usage.accepted_draft_tokens <= answer.usage.draft_tokens
