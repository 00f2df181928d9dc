"""Every way in which OpenAI's and vLLM's clients ask for an answer of some shape, through the SDK: the answer
has it, and is the one that gRPC gives.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
import pytest_asyncio
import torch
from openai import AsyncOpenAI

from engine.config import ModelConfig
from engine.loading import LoadedModel, load_model
from pdserve.client import FinishReason
from pdserve.requests import GenerateOptions
from tests.grammars import DATE, PERSON, SUM, is_person, is_sum
from tests.integration.http.sdk import sdk
from tests.models import tiny_model
from tests.serving import Serving, serving

CHAT = [{"role": "user", "content": "who is there?"}]
CHOICES = ["yes", "no/never", 'say "{1}"', "péut-être ^$"]
GBNF = """
root ::= greeting ", " name
greeting ::= "hello" | "good " ("morning" | "night")
name ::= [A-Z] [a-z]{1,6}
"""


@dataclass(frozen=True)
class Way:
    """`asked` in a body over HTTP; `options` is the same for gRPC, where there is one."""

    asked: dict[str, object]
    holds: Callable[[str], object]
    options: GenerateOptions | None = None


def is_match(pattern: str) -> Callable[[str], object]:
    return lambda text: re.fullmatch(pattern, text)


def is_choice(text: str) -> bool:
    return text in CHOICES


SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
WAYS = {
    "json_schema": Way({"response_format": SCHEMA_FORMAT}, is_person, {"json_schema": PERSON}),
    "guided_json": Way({"guided_json": PERSON}, is_person, {"json_schema": PERSON}),
    "guided_regex": Way({"guided_regex": DATE}, is_match(DATE), {"regex": DATE}),
    "anchors": Way({"guided_regex": f"^{DATE}$"}, is_match(DATE), {"regex": DATE}),
    "guided_grammar": Way({"guided_grammar": SUM}, is_sum, {"grammar": SUM}),
    "GBNF": Way({"guided_grammar": GBNF}, is_match("(hello|good (morning|night)), [A-Z][a-z]{1,6}")),
    "guided_choice": Way({"guided_choice": CHOICES}, is_choice),
    "structured json": Way({"structured_outputs": {"json": PERSON}}, is_person, {"json_schema": PERSON}),
    "structured regex": Way({"structured_outputs": {"regex": DATE}}, is_match(DATE), {"regex": DATE}),
    "structured choice": Way({"structured_outputs": {"choice": CHOICES}}, is_choice),
    "structured grammar": Way({"structured_outputs": {"grammar": SUM}}, is_sum, {"grammar": SUM}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(ModelConfig(id=str(folder), device="cpu", dtype="float32"))


@dataclass(frozen=True)
class Both:
    cluster: Serving
    http: AsyncOpenAI


@pytest_asyncio.fixture
async def both(folder: Path, loaded: LoadedModel) -> AsyncIterator[Both]:
    async with (
        serving(folder, loaded, router={"http": "127.0.0.1:0"}, num_blocks=400) as cluster,
        sdk(cluster.server.http_address) as client,
    ):
        yield Both(cluster, client)


async def test_a_chats_answer_has_the_shape_that_was_asked_for_and_is_grpcs(both: Both) -> None:
    for seed, (name, way) in enumerate(WAYS.items()):
        answer = await both.http.chat.completions.create(
            model="tiny",
            messages=CHAT,
            max_tokens=200,
            seed=seed,
            extra_body={**way.asked, "return_token_ids": True},
        )
        (choice,) = answer.choices
        assert choice.finish_reason == "stop", name
        assert way.holds(choice.message.content or ""), (name, choice.message.content)
        if way.options is not None:
            there = await both.cluster.client.generate(CHAT, max_tokens=200, seed=seed, **way.options)
            assert there.finish_reason is FinishReason.EOS
            assert tuple(choice.token_ids) == there.token_ids, name  # type: ignore[attr-defined]


async def test_so_has_a_completions_streamed_or_not_and_each_of_n(both: Both) -> None:
    for name, way in WAYS.items():
        whole = await both.http.completions.create(
            model="tiny", prompt=["a", "b"], n=2, max_tokens=200, seed=7, extra_body=way.asked
        )
        texts = [choice.text for choice in whole.choices]
        assert len(texts) == 4
        assert all(way.holds(text) for text in texts), (name, texts)
        chunks = await both.http.completions.create(
            model="tiny", prompt="a", max_tokens=200, seed=7, stream=True, extra_body=way.asked
        )
        assert "".join([chunk.choices[0].text async for chunk in chunks]) == texts[0]


async def test_json_object_gives_json_where_it_ends(both: Both) -> None:
    ended = 0
    for seed in range(5):
        answer = await both.http.chat.completions.create(
            model="tiny",
            messages=CHAT,
            max_tokens=60,
            seed=seed,
            response_format={"type": "json_object"},
            logit_bias={"92": 8, "1": 4},  # "}" and the quote
        )
        (choice,) = answer.choices
        if choice.finish_reason == "stop":
            ended += 1
            assert isinstance(json.loads(choice.message.content or ""), dict)
    assert ended


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}, "type: x"),
        ({"guided_regex": "("}, "unclosed group"),
        ({"guided_grammar": "start: x"}, "unknown name"),
    ],
)
async def test_what_cannot_be_honoured_is_a_bad_request(
    both: Both, asked: dict[str, object], complaint: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=complaint) as refused:
        await both.http.chat.completions.create(model="tiny", messages=CHAT, extra_body=asked)
    assert [refused.value.param] == list(asked)
    assert refused.value.type == "invalid_request_error"
