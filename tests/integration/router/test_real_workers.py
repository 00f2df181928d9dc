"""The router with real prefill, decode and colocated workers and a tiny model: tokens are the model's."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
import torch

from engine.config import ModelConfig
from engine.loading import LoadedModel, load_model
from engine.sampling import SamplingParams
from pdserve.client import Client, FinishReason, Generation
from tests.integration.router.harness import until
from tests.models import tiny_model
from tests.serving import TransportName, Worker, serving
from tests.unit.engine.driving import Reference, prompt
from worker.identity import Role

B = 16
LENGTHS = [1, B - 1, B, B + 1, 2 * B, 100]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(ModelConfig(id=str(folder), device="cpu"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.mark.parametrize("transport", ["grpc", "memory", "shm", "auto"])
async def test_tokens_are_the_models_and_both_pools_worked(
    folder: Path, loaded: LoadedModel, reference: Reference, transport: TransportName
) -> None:
    async with serving(folder, loaded, transport=transport) as cluster:
        for length in LENGTHS:
            for is_warm in (False, True):
                answer = await cluster.client.generate(
                    prompt(length), max_tokens=12, temperature=0, ignore_eos=True
                )
                reference.assert_follows(prompt(length), answer.token_ids)
                assert len(answer.token_ids) == answer.usage.completion_tokens == 12
                assert answer.finish_reason is FinishReason.LENGTH
                cached = answer.usage.cached_tokens
                assert cached == ((length - 1) // B * B if is_warm else 0)
                # Warm, a prompt of whole blocks lies in the decode worker's cache already.
                assert answer.timings.transfer_bytes > 0 or (is_warm and length % B == 0)
                assert answer.timings.transfer_ms > 0
        (p,), (d,) = cluster.of(Role.PREFILL), cluster.of(Role.DECODE)
        assert p.describe().counters.tokens_prefilled > 0
        assert p.describe().counters.kv_bytes_sent > 0
        assert d.describe().counters.tokens_decoded == len(LENGTHS) * 2 * 11
        assert d.describe().counters.kv_bytes_received > 0


@pytest.mark.parametrize("transport", ["grpc", "shm"])
async def test_prompts_that_interrupt_each_other_keep_their_tokens(
    folder: Path, loaded: LoadedModel, reference: Reference, transport: TransportName
) -> None:
    """The longest is sent first, each in chunks of a block."""
    lengths = [300, 200, 150, 90, 40, 20, 5]

    async def generate(client: Client, length: int) -> None:
        ids = prompt(length, seed=2)
        answer = await client.generate(ids, max_tokens=8, temperature=0, ignore_eos=True)
        reference.assert_follows(ids, answer.token_ids)

    async with serving(
        folder,
        loaded,
        transport=transport,
        prefill_order="shortest",
        max_num_batched_tokens=B,
        num_blocks=100,
    ) as cluster:
        await asyncio.gather(*(generate(cluster.client, length) for length in lengths))


async def test_a_seeded_sample_is_the_same_alone_in_a_crowd_and_colocated(
    folder: Path, loaded: LoadedModel, reference: Reference
) -> None:
    sampling = SamplingParams(temperature=0.8, seed=9)

    async def sample(client: Client) -> Generation:
        return await client.generate(
            prompt(40), max_tokens=20, temperature=sampling.temperature, seed=9, ignore_eos=True
        )

    async with serving(folder, loaded, num_blocks=200) as cluster:
        alone = await sample(cluster.client)
        crowd = [
            cluster.client.generate(prompt(length, seed=1), max_tokens=20, ignore_eos=True)
            for length in range(20, 35)
        ]
        among, *_ = await asyncio.gather(sample(cluster.client), *crowd)
    async with serving(folder, loaded, [Role.COLOCATED]) as cluster:
        here = await sample(cluster.client)
        assert here.timings.prefill_ms > 0
    for answer in (alone, among, here):
        reference.assert_follows(prompt(40), answer.token_ids, sampling)


async def test_a_proxy_for_the_world_outside_is_not_used_inside(
    folder: Path, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody listens there
    async with serving(folder, loaded) as cluster:
        answer = await cluster.client.generate(prompt(20), max_tokens=3, ignore_eos=True, timeout=20)
        assert len(answer.token_ids) == 3


async def test_n_sequences_share_the_prompts_blocks(folder: Path, loaded: LoadedModel) -> None:
    async with serving(folder, loaded) as cluster:
        answer = await cluster.client.generate(prompt(5 * B + 1), max_tokens=6, seed=3, n=3, ignore_eos=True)
        first, *others = answer.completions
        assert first.usage.cached_tokens == 0
        assert all(each.usage.cached_tokens == 5 * B for each in others)
        assert all(each.timings.transfer_bytes * 6 == first.timings.transfer_bytes for each in others)


async def test_text_chat_stop_strings_and_logprobs(folder: Path, loaded: LoadedModel) -> None:
    async with serving(folder, loaded) as cluster:
        client, tokenizer = cluster.client, cluster.router._folder.tokenizer
        text = "漢字 \U0001f600 hi"
        answer = await client.generate(text, max_tokens=40, seed=1, ignore_eos=True, logprobs=2)
        assert answer.text == tokenizer.decode(list(answer.token_ids), skip_special_tokens=True)
        logprobs = answer.completions[0].logprobs
        assert [each.chosen.token_id for each in logprobs] == list(answer.token_ids)
        assert all(len(each.top) == 2 and math.isfinite(each.chosen.logprob) for each in logprobs)
        stop = answer.text[10:12]
        stopped = await client.generate(text, max_tokens=40, seed=1, ignore_eos=True, stop=stop)
        assert stopped.text == answer.text[: answer.text.index(stop)]
        assert answer.token_ids[: len(stopped.token_ids)] == stopped.token_ids
        await client.generate([{"role": "user", "content": "hi"}], max_tokens=3)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_worker_that_stops_mid_stream_changes_no_token(
    folder: Path, loaded: LoadedModel, reference: Reference, role: Role
) -> None:
    async with serving(
        folder, loaded, [Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE], num_blocks=100
    ) as cluster:
        sampling = SamplingParams(temperature=0.8, seed=4)
        work = [
            asyncio.ensure_future(
                cluster.client.generate(
                    prompt(30, seed=number), max_tokens=60, temperature=0.8, seed=4, ignore_eos=True
                )
            )
            for number in range(6)
        ]
        doomed = cluster.of(role)[0]
        counters = doomed.describe().counters
        await until(lambda: _progress(doomed) > 40)
        await doomed.stop()
        cluster.workers.remove(doomed)
        await cluster.show()
        answers = await asyncio.gather(*work)
        for number, answer in enumerate(answers):
            assert len(answer.token_ids) == 60
            reference.assert_follows(prompt(30, seed=number), answer.token_ids, sampling)
        assert counters.tokens_decoded == 0
        if role is Role.DECODE:
            assert sum(answer.completions[0].num_resumes for answer in answers) > 0


def _progress(worker: Worker) -> int:
    counters = worker.describe().counters
    return counters.tokens_prefilled + counters.tokens_decoded


async def test_cancels_and_deadlines_return_every_block(folder: Path, loaded: LoadedModel) -> None:
    async with serving(folder, loaded) as cluster:

        async def one(number: int) -> None:
            call = asyncio.ensure_future(
                cluster.client.generate(
                    prompt(40, seed=number), max_tokens=100, ignore_eos=True, timeout=0.05 + number % 4
                )
            )
            await asyncio.sleep(0.01 * (number % 20))
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

        await asyncio.gather(*(one(number) for number in range(40)))
        await until(cluster.is_idle)


async def test_more_than_the_pools_hold_at_once_all_finish(
    folder: Path, loaded: LoadedModel, reference: Reference
) -> None:
    async with serving(folder, loaded, num_blocks=12) as cluster:
        answers = await asyncio.gather(
            *(
                cluster.client.generate(
                    prompt(50, seed=number), max_tokens=30, temperature=0, ignore_eos=True
                )
                for number in range(12)
            )
        )
        for number, answer in enumerate(answers):
            reference.assert_follows(prompt(50, seed=number), answer.token_ids)
