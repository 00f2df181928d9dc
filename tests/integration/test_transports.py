"""Tokens are the model's over every transport, however much of the KV is checked."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from decode_worker.config import DecodeConfig
from engine.config import ModelConfig
from engine.loading import LoadedModel, load_model
from engine.sampling import SamplingParams
from kv_transfer.send_queue import SenderConfig
from kv_transfer.verify import Verify
from prefill_worker.config import PrefillConfig
from tests.integration.workers.conftest import no_uncomputed_kv_arrives
from tests.models import tiny_model
from tests.serving import TransportName, serving
from tests.unit.engine.driving import Reference, prompt
from worker.identity import Role

__all__ = ["no_uncomputed_kv_arrives"]

B = 16
# Around the borders of blocks and of chunks (48 tokens).
LENGTHS = (1, B - 1, B, B + 1, 3 * B, 3 * B + 1, 100, 200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(ModelConfig(id=str(folder), device="cpu"))


@pytest.mark.parametrize("transport", ["memory", "grpc", "shm", "collective"])
@pytest.mark.parametrize("verify", [Verify.OFF, Verify.FULL])
async def test_greedy_and_drawn_tokens_are_the_models_alone_and_together(
    folder: Path, loaded: LoadedModel, transport: TransportName, verify: Verify
) -> None:
    reference = Reference(folder)
    settings = PrefillConfig(min_group_bytes=1, sender=SenderConfig(verify=verify))
    async with serving(
        folder,
        loaded,
        transport=transport,
        prefill_config=settings,
        decode_config=DecodeConfig(verify=verify),
        num_blocks=160,
    ) as cluster:
        generate = cluster.client.generate
        for length in LENGTHS:
            alone = await generate(prompt(length), max_tokens=8, temperature=0, ignore_eos=True)
            reference.assert_follows(prompt(length), alone.token_ids)
        drawn = [
            generate(prompt(length, 1), max_tokens=8, temperature=0.8, seed=length, ignore_eos=True)
            for length in LENGTHS
        ]
        for length, answer in zip(LENGTHS, await asyncio.gather(*drawn), strict=True):
            sampling = SamplingParams(temperature=0.8, seed=length)
            reference.assert_follows(prompt(length, 1), answer.token_ids, sampling)
        (p,) = cluster.of(Role.PREFILL)
        # What each pair uses, and that no way was taken instead of the one that was asked for.
        assert [route.transport for route in p.describe().kv_routes] == [transport]
