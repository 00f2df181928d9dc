"""OpenAI's own SDK against a running 1P1D with a tiny model, and the same requests over gRPC: one answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
import pytest_asyncio
import torch
from openai import AsyncOpenAI

from engine.config import ModelConfig
from engine.loading import LoadedModel, load_model
from pdserve.client import FinishReason, Generation
from tests.integration.http.sdk import sdk
from tests.models import tiny_model
from tests.serving import Serving, serving

PROMPT = "the quick brown fox"
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "name a colour"}]
NAMES = {FinishReason.EOS: "stop", FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(ModelConfig(id=str(folder), device="cpu"))


@dataclass(frozen=True)
class Both:
    cluster: Serving
    http: AsyncOpenAI


@pytest_asyncio.fixture
async def both(folder: Path, loaded: LoadedModel) -> AsyncIterator[Both]:
    async with (
        serving(folder, loaded, router={"http": "127.0.0.1:0"}) as cluster,
        sdk(cluster.server.http_address) as client,
    ):
        yield Both(cluster, client)


async def over_grpc(both: Both, prompt: object, **options: object) -> Generation:
    return await both.cluster.client.generate(prompt, **options)  # type: ignore[arg-type]


def name(raw: bytes) -> str:
    """As OpenAI names a token: by its text, or by its bytes where they are no text."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


async def test_a_completion_is_grpcs_text_token_for_token(both: Both) -> None:
    for seed in range(4):
        there = await over_grpc(both, PROMPT, max_tokens=24, seed=seed, temperature=0.8, ignore_eos=True)
        here = await both.http.completions.create(
            model="tiny",
            prompt=PROMPT,
            max_tokens=24,
            seed=seed,
            temperature=0.8,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        (choice,) = here.choices
        assert choice.text == there.text
        assert tuple(choice.token_ids) == there.token_ids  # type: ignore[attr-defined]
        assert choice.finish_reason == NAMES[there.finish_reason] == "length"
        assert here.usage is not None
        assert here.usage.prompt_tokens == there.usage.prompt_tokens
        assert here.usage.completion_tokens == 24
        assert here.usage.total_tokens == there.usage.prompt_tokens + 24


async def test_a_streamed_completion_joins_to_the_whole_one(both: Both) -> None:
    there = await over_grpc(both, PROMPT, max_tokens=24, seed=5, ignore_eos=True)
    chunks = await both.http.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=24,
        seed=5,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    seen = [chunk async for chunk in chunks]
    *pieces, last = seen
    assert len({chunk.id for chunk in seen}) == 1
    assert "".join(chunk.choices[0].text for chunk in pieces) == there.text
    ids = [token for chunk in pieces for token in getattr(chunk.choices[0], "token_ids", ())]
    assert tuple(ids) == there.token_ids
    assert [chunk.choices[0].finish_reason for chunk in pieces][-2:] == [None, "length"]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 24
    assert all(chunk.usage is None for chunk in pieces)


async def test_a_chat_is_grpcs_text_streaming_and_not(both: Both) -> None:
    there = await over_grpc(both, CHAT, max_tokens=20, seed=3)
    here = await both.http.chat.completions.create(
        model="tiny", messages=CHAT, max_completion_tokens=20, seed=3, extra_body={"return_token_ids": True}
    )
    assert here.choices[0].message.role == "assistant"
    assert here.choices[0].message.content == there.text
    assert tuple(here.choices[0].token_ids) == there.token_ids  # type: ignore[attr-defined]
    chunks = await both.http.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=20, seed=3, stream=True
    )
    seen = [chunk async for chunk in chunks]
    assert seen[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in seen) == there.text
    assert seen[-1].choices[0].finish_reason == NAMES[there.finish_reason]


async def test_n_sequences_are_grpcs_in_their_order(both: Both) -> None:
    there = await over_grpc(both, PROMPT, max_tokens=8, seed=1, n=3, ignore_eos=True)
    here = await both.http.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=8, seed=1, n=3, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in here.choices] == [0, 1, 2]
    assert [choice.text for choice in here.choices] == [each.text for each in there.completions]
    assert here.usage is not None
    assert here.usage.prompt_tokens == there.completions[0].usage.prompt_tokens
    assert here.usage.completion_tokens == 24
    texts = ["", "", ""]
    async for chunk in await both.http.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=8, seed=1, n=3, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    chats = await over_grpc(both, CHAT, max_tokens=8, seed=1, n=3)
    assert texts == [each.text for each in chats.completions]


async def test_a_list_of_prompts_is_each_of_them(both: Both) -> None:
    prompts = [PROMPT, "and another", "a third one"]
    here = await both.http.completions.create(
        model="tiny", prompt=prompts, max_tokens=6, seed=2, n=2, extra_body={"ignore_eos": True}
    )
    alone = [await over_grpc(both, prompt, max_tokens=6, seed=2, n=2, ignore_eos=True) for prompt in prompts]
    expected = [completion.text for answer in alone for completion in answer.completions]
    assert [choice.index for choice in here.choices] == list(range(6))
    assert [choice.text for choice in here.choices] == expected
    assert here.usage is not None
    assert here.usage.prompt_tokens == sum(each.completions[0].usage.prompt_tokens for each in alone)


async def test_token_ids_are_a_prompt_and_so_is_a_list_of_them(both: Both) -> None:
    one, other = [7, 8, 9, 10], [3, 2, 1]
    there = [await over_grpc(both, ids, max_tokens=5, seed=4) for ids in (one, other)]
    alone = await both.http.completions.create(model="tiny", prompt=one, max_tokens=5, seed=4)
    assert alone.choices[0].text == there[0].text
    together = await both.http.completions.create(model="tiny", prompt=[one, other], max_tokens=5, seed=4)
    assert [choice.text for choice in together.choices] == [each.text for each in there]


async def test_logprobs_are_grpcs_with_each_tokens_own_text(both: Both) -> None:
    there = await over_grpc(both, PROMPT, max_tokens=6, seed=6, logprobs=3, ignore_eos=True)
    positions = there.completions[0].logprobs
    bytes_of = both.cluster.router.codec.bytes_of
    here = await both.http.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=6, seed=6, logprobs=3, extra_body={"ignore_eos": True}
    )
    logprobs = here.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == pytest.approx([each.chosen.logprob for each in positions])
    assert logprobs.tokens == [name(bytes_of(each.chosen.token_id)) for each in positions]
    assert logprobs.text_offset is not None
    assert logprobs.text_offset[0] == 0
    assert logprobs.top_logprobs is not None
    for position, top in zip(positions, logprobs.top_logprobs, strict=True):
        likeliest = {name(bytes_of(each.token_id)): each.logprob for each in (*position.top, position.chosen)}
        assert top == pytest.approx(likeliest)
        assert len(top) in (3, 4)


async def test_a_chats_logprobs_carry_bytes_and_the_likeliest_tokens(both: Both) -> None:
    there = await over_grpc(both, CHAT, max_tokens=5, seed=6, logprobs=2)
    positions = there.completions[0].logprobs
    bytes_of = both.cluster.router.codec.bytes_of
    here = await both.http.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=5, seed=6, logprobs=True, top_logprobs=2
    )
    streamed = await both.http.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=5, seed=6, logprobs=True, top_logprobs=2, stream=True
    )
    pieces = [chunk.choices[0].logprobs async for chunk in streamed]
    parts = [part for piece in pieces if piece is not None for part in piece.content or ()]
    assert here.choices[0].logprobs is not None
    content = here.choices[0].logprobs.content
    assert content == parts
    assert content is not None
    for position, token in zip(positions, content, strict=True):
        assert token.logprob == pytest.approx(position.chosen.logprob)
        assert token.token == name(bytes_of(position.chosen.token_id))
        assert bytes(token.bytes or ()) == bytes_of(position.chosen.token_id)
        assert [each.logprob for each in token.top_logprobs] == pytest.approx(
            [each.logprob for each in position.top]
        )


async def test_a_stop_string_ends_the_text_before_it(both: Both) -> None:
    plain = await over_grpc(both, PROMPT, max_tokens=24, seed=8, ignore_eos=True)
    stop = plain.text[6:9]
    here = await both.http.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=24, seed=8, stop=stop, extra_body={"ignore_eos": True}
    )
    assert here.choices[0].text == plain.text[: plain.text.index(stop)]
    assert here.choices[0].finish_reason == "stop"
    assert here.choices[0].stop_reason == stop  # type: ignore[attr-defined]


async def test_what_changes_the_draw_changes_it_as_over_grpc(both: Both) -> None:
    bias = {65: 4.0, 66: 4.0}
    there = await over_grpc(
        both,
        PROMPT,
        max_tokens=16,
        min_tokens=12,
        seed=9,
        top_k=40,
        top_p=0.9,
        min_p=0.01,
        temperature=1.3,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias=bias,
        stop_token_ids=[70],
    )
    here = await both.http.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=16,
        seed=9,
        top_p=0.9,
        temperature=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={str(id): value for id, value in bias.items()},
        extra_body={
            "top_k": 40,
            "min_p": 0.01,
            "repetition_penalty": 1.1,
            "min_tokens": 12,
            "stop_token_ids": [70],
            "return_token_ids": True,
        },
    )
    assert tuple(here.choices[0].token_ids) == there.token_ids  # type: ignore[attr-defined]


async def test_the_sdk_finds_the_model_and_raises_its_own_errors(both: Both) -> None:
    listed = [model async for model in await both.http.models.list()]
    assert [model.id for model in listed] == ["tiny"]
    assert (await both.http.models.retrieve("tiny")).id == "tiny"
    with pytest.raises(openai.NotFoundError) as unknown:
        await both.http.completions.create(model="another", prompt="x")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        await both.http.completions.create(model="tiny", prompt="x", temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        await both.http.completions.create(model="tiny", prompt="x", max_tokens=1_000_000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as unserved:
        await both.http.chat.completions.create(
            model="tiny",
            messages=CHAT,
            tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
        )
    assert unserved.value.param == "tools"
