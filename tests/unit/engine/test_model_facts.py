"""What is told of a model without its weights is what loading finds."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import EngineConfig, ModelConfig
from engine.loading import load_model
from engine.model_facts import ModelFacts, read_facts
from tests.models import tiny_model

FLOAT16 = ModelFacts(
    kind="llama",
    num_weights=1000,
    stored_dtype="float16",
    num_layers=2,
    num_kv_heads=2,
    head_dim=16,
    hidden_size=64,
    intermediate_size=128,
    vocab_size=512,
    context=2048,
)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "qwen3_moe", "gpt_oss"])
def test_the_shape_of_kv_and_the_size_are_those_of_the_loaded_model(tmp_path: Path, family: str) -> None:
    folder = tiny_model(tmp_path, family)
    facts = read_facts(folder, None)
    loaded = load_model(ModelConfig(id=str(folder), dtype="float32", device="cpu", compile="off"))
    told, found = facts.layout(16, facts.dtype("float32", is_cuda=False)), loaded.layout(16)
    assert told.block_shape == found.block_shape
    assert told.block_bytes == found.block_bytes
    assert facts.context == loaded.max_model_len
    in_memory = sum(each.numel() * each.element_size() for each in loaded.module.parameters())
    assert facts.weights_bytes("float32") == in_memory


def test_half_precision_follows_the_device() -> None:
    facts = FLOAT16
    assert facts.dtype("auto", is_cuda=False) == "bfloat16"
    assert facts.dtype("auto", is_cuda=True) == "float16"
    assert facts.dtype("float32", is_cuda=True) == "float32"


def test_a_wider_step_needs_more_room() -> None:
    facts = FLOAT16
    narrow, wide = (EngineConfig(max_num_batched_tokens=size) for size in (128, 4096))
    assert facts.working_bytes(wide, "float16") > facts.working_bytes(narrow, "float16")
