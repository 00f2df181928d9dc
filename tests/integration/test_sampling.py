"""Every sampling option through router, prefill and decode worker: what one slow process gives, and so it
stays when a tiny pool preempts and when a decode worker is lost in the middle of the answer.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.config import ModelConfig
from engine.engine import Engine
from engine.loading import LoadedModel, load_model
from engine.loop import EngineLoop
from engine.request import StepResult
from pdserve.client import Client, Generation, Unimplemented
from pdserve.requests import GenerateOptions, build_request
from tests.integration.router.harness import until
from tests.models import END_OF_TEXT, tiny_model
from tests.reference_sampler import ReferenceSampler
from tests.serving import serving
from tests.unit.engine.driving import prompt
from worker.identity import Role

NUM_BEFORE = 6  # tokens that a worker draws before it is lost
FLOATS = {
    *("temperature", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
}
LETTERS: Mapping[int, float] = dict.fromkeys(range(64, 72), 6.0)  # "a" … "h": ends come soon
STOPS = ("to be found in the answer",)

OPTIONS: dict[str, GenerateOptions] = {
    "greedy": {"temperature": 0.0},
    "the defaults": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 5},
    "top_k of one": {"top_k": 1},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.15},
    "all cuts": {"temperature": 1.4, "top_k": 60, "top_p": 0.9, "min_p": 0.02},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "a reward for repetition": {"temperature": 0.0, "repetition_penalty": 0.6},
    "presence_penalty": {"temperature": 0.0, "presence_penalty": 2.0},
    "frequency_penalty": {"temperature": 0.5, "frequency_penalty": 1.5, "logit_bias": LETTERS},
    "a reward for frequency": {"frequency_penalty": -1.0},
    "logit_bias": {"logit_bias": {5: 4.0, 200: 5.5, 300: -9.0, 17: -1e6}},
    "min_tokens": {"min_tokens": 9, "ignore_eos": False, "logit_bias": {END_OF_TEXT: 40.0}},
    "stop_token_ids": {"stop_token_ids": [64, 66, 69], "logit_bias": LETTERS, "min_tokens": 3},
    "a stop id that stays": {
        "stop_token_ids": [65, 68],
        "logit_bias": LETTERS,
        "include_stop_in_output": True,
    },
    "stop strings": {"stop": STOPS, "logit_bias": LETTERS},
    "stop strings, greedy": {"stop": STOPS, "temperature": 0.0, "include_stop_in_output": True},
    "stop strings that stay": {"stop": STOPS, "logit_bias": LETTERS, "include_stop_in_output": True},
    "stop strings after min_tokens": {"stop": STOPS, "logit_bias": LETTERS, "min_tokens": 12},
    "logprobs of the chosen": {"logprobs": 0},
    "logprobs": {"logprobs": 7, "top_k": 20, "repetition_penalty": 1.2, "logit_bias": {9: 3.0}},
    "n": {"n": 3, "logprobs": 2, "top_p": 0.9, "presence_penalty": 0.5},
}


def mixed(seed: int) -> GenerateOptions:
    """About half of all options, set to something."""
    dice = random.Random(seed)
    every: GenerateOptions = {
        "temperature": dice.uniform(0.2, 1.5),
        "top_k": dice.randrange(2, 200),
        "top_p": dice.uniform(0.3, 1.0),
        "min_p": dice.uniform(0.0, 0.2),
        "repetition_penalty": dice.uniform(0.7, 1.6),
        "presence_penalty": dice.uniform(-2.0, 2.0),
        "frequency_penalty": dice.uniform(-1.0, 2.0),
        "logit_bias": LETTERS,
        "min_tokens": dice.randrange(24),
        "stop_token_ids": [71],
        "stop": STOPS,
        "include_stop_in_output": dice.random() < 0.5,
        "ignore_eos": dice.random() < 0.5,
        "logprobs": dice.randrange(5),
        "n": dice.randrange(1, 3),
    }
    return {name: value for name, value in every.items() if dice.random() < 0.55}  # type: ignore[return-value]


OPTIONS |= {f"mixed {seed}": mixed(seed) for seed in range(6)}


@dataclass(frozen=True)
class Wish:
    """What a client asks for, with floats as they are on the wire: both sides mean the same number."""

    name: str
    prompt: tuple[int, ...]
    options: GenerateOptions

    async def ask(self, client: Client) -> Generation:
        return await client.generate(self.prompt, **self.options)

    def check(self, sampler: ReferenceSampler, answer: Generation) -> None:
        try:
            sampler.check(self.prompt, self.options, answer.completions)
        except AssertionError as error:
            raise AssertionError(f"{self.name}: {self.options}") from error


def wishes_of(sampler: ReferenceSampler, max_tokens: int) -> list[Wish]:
    made: list[Wish] = []
    for index, (name, chosen) in enumerate(OPTIONS.items()):
        fixed: GenerateOptions = {"max_tokens": max_tokens, "seed": 2**63 + 11, "ignore_eos": True}
        options: GenerateOptions = {**fixed, **chosen}
        sampling = build_request("x", options).sampling
        for field in FLOATS & options.keys():
            options[field] = getattr(sampling, field)  # type: ignore[literal-required]
        wish = Wish(name, prompt(30 + index), options)
        if options.pop("stop", None) is not None:
            text = sampler.generate(wish.prompt, options).text
            options["stop"] = _stops_in(text)
        made.append(wish)
    return made


def _stops_in(text: str) -> list[str]:
    """Some that a text runs into, in its second half if it can be, one the other's end; and some others."""
    places = [place for place in range(len(text) - 2) if text[place : place + 3].isascii()]
    begin = next((place for place in places if place >= len(text) // 2), places[-1])
    found = text[begin : begin + 3]
    return [found[1:], found, "never there", f"{found}!"]


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
def short(sampler: ReferenceSampler) -> list[Wish]:
    return wishes_of(sampler, 24)


@pytest.fixture(scope="module")
def long(sampler: ReferenceSampler) -> list[Wish]:
    return wishes_of(sampler, 48)


async def test_each_option_gives_what_one_process_gives(
    folder: Path, loaded: LoadedModel, sampler: ReferenceSampler, short: list[Wish]
) -> None:
    ends: Counter[type] = Counter()
    async with serving(folder, loaded) as cluster:
        for wish in short:
            answer = await wish.ask(cluster.client)
            wish.check(sampler, answer)
            (first, *_) = answer.completions
            ends[type(first.matched_stop or first.matched_token_id)] += 1
    assert sampler.num_ties <= 1
    assert min(ends[str], ends[int]) >= 2  # ends of every kind were seen


async def test_options_survive_preemption(
    folder: Path, loaded: LoadedModel, sampler: ReferenceSampler, long: list[Wish]
) -> None:
    """A pool of a few sequences, whose growth nobody kept room for: they throw each other out."""
    async with serving(folder, loaded, block_size=4, num_blocks=64) as cluster:
        answers = await asyncio.gather(*(wish.ask(cluster.client) for wish in long))
        (decode,) = cluster.of(Role.DECODE)
        assert decode.describe().counters.num_preemptions > 5
    for wish, answer in zip(long, answers, strict=True):
        wish.check(sampler, answer)


async def test_options_survive_being_thrown_out_every_few_tokens(
    folder: Path,
    loaded: LoadedModel,
    sampler: ReferenceSampler,
    short: list[Wish],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which sequences a small pool throws out is chance: here it is every one of them, many times."""
    async with serving(folder, loaded, num_blocks=400) as cluster:
        (decode,) = cluster.of(Role.DECODE)
        engine = decode._loop.engine
        steps, step = itertools.count(1), engine.step

        def preempting() -> StepResult:
            if next(steps) % 5 == 0:
                for sequence in list(engine._scheduler.running.values()):
                    engine._scheduler._preempt(sequence)
            return step()

        monkeypatch.setattr(engine, "step", preempting)
        answers = await asyncio.gather(*(wish.ask(cluster.client) for wish in short))
        assert decode.describe().counters.num_preemptions > 2 * len(short)
    for wish, answer in zip(short, answers, strict=True):
        wish.check(sampler, answer)


class Stalling:
    """In place of an engine's `step`: nothing runs before `is_open`, or once a sequence has drawn enough."""

    def __init__(self, engine: Engine, num_tokens: int) -> None:
        self.is_open = False
        self._engine = engine
        self._step = engine.step
        self._num_tokens = num_tokens

    @property
    def has_drawn(self) -> bool:
        return any(each.num_output_tokens >= self._num_tokens for each in self._engine._living.values())

    def __call__(self) -> StepResult:
        return self._step() if self.is_open and not self.has_drawn else StepResult((), 0.0)


async def test_options_survive_the_loss_of_a_decode_worker(
    folder: Path,
    loaded: LoadedModel,
    sampler: ReferenceSampler,
    long: list[Wish],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All sequences come to one decode worker, draw a few tokens there together, and go on at another."""
    roles = [Role.PREFILL, Role.DECODE, Role.DECODE]
    async with serving(folder, loaded, roles, num_blocks=400) as cluster:
        doomed, spare = cluster.of(Role.DECODE)
        cluster.workers.remove(spare)
        await cluster.show()
        await until(lambda: len(cluster.router.table.all()) == 2)
        loop = doomed._loop
        stalling = Stalling(loop.engine, num_tokens=NUM_BEFORE)
        monkeypatch.setattr(loop.engine, "step", stalling)
        asking = [asyncio.create_task(wish.ask(cluster.client)) for wish in long]
        await until(lambda: _prompts(loop) == {wish.prompt for wish in long}, timeout_s=30)
        stalling.is_open = True
        await until(lambda: loop.call(lambda _: stalling.has_drawn).result(5), timeout_s=30)
        cluster.workers.append(spare)
        await cluster.ready()
        await doomed.stop()
        cluster.workers.remove(doomed)
        await cluster.show()
        answers = await asyncio.gather(*asking)
    for wish, answer in zip(long, answers, strict=True):
        (first, *_) = answer.completions
        assert first.num_resumes == (len(first.token_ids) > NUM_BEFORE), wish.name
        wish.check(sampler, answer)


def _prompts(loop: EngineLoop) -> set[tuple[int, ...]]:
    """Of the sequences that an engine has."""
    return loop.call(lambda engine: {s.request.prompt_token_ids for s in engine._living.values()}).result(5)


async def test_what_is_not_there_yet_is_refused_by_name(folder: Path, loaded: LoadedModel) -> None:
    async with serving(folder, loaded) as cluster:
        with pytest.raises(Unimplemented, match="prompt_logprobs"):
            await cluster.client.generate([1, 2], prompt_logprobs=True)
