"""The native stack beside transformers' module: which modules it takes, and that it gives their tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.attention import ATTENTION_NAME
from engine.batch import BatchRow, pack
from engine.config import EngineConfig, ModelConfig
from engine.engine import Engine
from engine.errors import ModelError, NativeUnavailable
from engine.kv_pool import KVPool
from engine.loading import LoadedModel, load_model
from engine.native.decoder import NativeRun
from engine.native.library import NativeError
from engine.native.recognise import recognise
from engine.runner import ModelRunner
from tests.families import SERVED
from tests.models import VOCAB_SIZE, tiny_model
from tests.unit.engine.driving import Reference, generate, prompt, request
from tests.unit.engine.native.kernels import library_or_skip

KNOWN = ("llama", "mistral", "qwen2", "qwen3")
# What a config can ask of a family beside its default, sizes that fill no vector and no tile included.
SHAPES: dict[str, dict[str, object]] = {
    "biases": {"attention_bias": True, "mlp_bias": True},
    "odd sizes": {"hidden_size": 72, "intermediate_size": 100, "num_attention_heads": 3,
                  "num_key_value_heads": 1, "head_dim": 48},
    "a head for each query": {"num_key_value_heads": 4},
    "tied": {"tie_word_embeddings": True},
    "scaled rotary": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _needs_kernels() -> None:
    library_or_skip()


def load(folder: Path, dtype: str = "float32", compile: str = "on") -> LoadedModel:
    return load_model(
        ModelConfig.model_validate({"id": str(folder), "device": "cpu", "dtype": dtype, "compile": compile})
    )


def module_of(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=ATTENTION_NAME).eval()


def pool_of(model: LoadedModel, num_blocks: int = 64) -> KVPool:
    pool = KVPool(model.layout(16), num_blocks, torch.device("cpu"))
    pool.poison(range(num_blocks))
    return pool


def randomise_biases(folder: Path) -> None:
    """New models have biases of zero, which would hide that one is left out."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.5, generator=torch.Generator().manual_seed(len(name)))
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(len(name)))
    model.save_pretrained(folder)


def check_greedy(folder: Path, lengths: Sequence[int] = (1, 17, 40, 70)) -> None:
    model = load(folder)
    assert model.decoder is not None
    assert model.kernels == "compiled"
    engine = Engine(model, EngineConfig(num_blocks=64, max_num_batched_tokens=48, poison_blocks=True))
    reference = Reference(folder)
    outputs = generate(engine, *(request(prompt(length), 16) for length in lengths))
    for length, output in zip(lengths, outputs, strict=True):
        assert output == reference.generate(prompt(length), 16)


@pytest.mark.parametrize("family", KNOWN)
def test_a_known_family_runs_natively_and_gives_generates_tokens(family, tmp_path):
    folder = tiny_model(tmp_path, family)
    randomise_biases(folder)
    check_greedy(folder)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_llama_of_another_shape_gives_generates_tokens(shape, tmp_path):
    folder = tiny_model(tmp_path, **SHAPES[shape])
    randomise_biases(folder)
    check_greedy(folder)


@pytest.mark.parametrize("family", [each.name for each in SERVED if each.name not in KNOWN])
def test_every_other_family_is_left_to_its_module_with_a_reason(family, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        model = load(tiny_model(tmp_path, family), compile="auto")
    assert model.decoder is None
    assert model.kernels.startswith("compiled attention: ")
    assert model.module is not None
    assert model.library is not None
    assert any("transformers' layers" in line for line in caplog.messages)


def test_a_module_that_was_changed_is_not_recognised(tmp_path):
    class Linear(torch.nn.Linear):
        pass

    class Mlp(type(module_of(tiny_model(tmp_path)).model.layers[0].mlp)):
        pass

    def refusal(change: str) -> str:
        module = module_of(tmp_path / "tiny-llama-0")
        layer = module.model.layers[1]
        if change == "linear":
            layer.mlp.up_proj = Linear(64, 128, bias=False)
        elif change == "class":
            layer.mlp.__class__ = Mlp
        elif change == "activation":
            layer.mlp.act_fn = torch.nn.GELU()
        elif change == "epsilon":
            layer.input_layernorm.variance_epsilon *= 2
        elif change == "dtype":
            layer.mlp.down_proj.bfloat16()
        elif change == "head":
            module.lm_head = torch.nn.Linear(64, VOCAB_SIZE)
        with pytest.raises(NativeUnavailable) as caught:
            recognise(module, (None, None))
        return str(caught.value)

    assert "up_proj is Linear, no plain" in refusal("linear")
    assert "LlamaMLP was expected" in refusal("class")
    assert "GELU, not SiLU" in refusal("activation")
    assert "differ in variance_epsilon" in refusal("epsilon")
    assert "float32 and torch.bfloat16" in refusal("dtype")
    assert "head has a bias" in refusal("head")


def test_a_head_size_that_fills_no_vector_is_left_to_the_module(tmp_path):
    folder = tiny_model(tmp_path, head_dim=24)
    model = load(folder)
    assert model.decoder is None
    (tokens,) = generate(Engine(model, EngineConfig(num_blocks=16)), request(prompt(20), 8))
    assert tokens == Reference(folder).generate(prompt(20), 8)


def test_a_decoder_that_differs_from_its_module_is_not_used(tmp_path, monkeypatch, caplog):
    folder = tiny_model(tmp_path)
    run = NativeRun.run
    monkeypatch.setattr(NativeRun, "run", lambda self, batch: run(self, batch).roll(1, dims=-1))
    with caplog.at_level(logging.WARNING):
        model = load(folder, compile="auto")
    assert model.decoder is None
    assert any("other logits than the module" in line for line in caplog.messages)
    (tokens,) = generate(Engine(model, EngineConfig(num_blocks=16)), request(prompt(20), 8))
    assert tokens == Reference(folder).generate(prompt(20), 8)


def test_on_refuses_a_known_family_whose_decoder_differs(tmp_path, monkeypatch):
    folder = tiny_model(tmp_path)
    run = NativeRun.run
    monkeypatch.setattr(NativeRun, "run", lambda self, batch: run(self, batch).roll(1, dims=-1))
    with pytest.raises(ModelError, match=r"compile: on .*our decoder of llama .* other logits"):
        load(folder, compile="on")


def test_on_leaves_an_unknown_family_to_its_module_with_our_attention(tmp_path):
    model = load(tiny_model(tmp_path, next(each.name for each in SERVED if each.name not in KNOWN)))
    assert model.decoder is None
    assert model.library is not None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", KNOWN)
def test_logits_are_those_of_the_module(family, dtype, tmp_path):
    folder = tiny_model(tmp_path, family)
    native, plain = load(folder, dtype), load(folder, dtype, compile="off")
    assert native.decoder is not None
    row = BatchRow(prompt(40), 0, range(3))
    result, expected = (
        ModelRunner(model, pool_of(model)).run([row], [40]).float() for model in (native, plain)
    )
    error = ((result - expected).norm() / expected.norm()).item()
    assert error < (1e-5 if dtype == "float32" else 0.02)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tokens_logits_are_the_same_bits_alone_in_a_batch_and_in_any_chunk(dtype, tmp_path):
    model = load(tiny_model(tmp_path, hidden_size=96, intermediate_size=200), dtype)
    assert model.decoder is not None
    ids = prompt(50)
    rows = [BatchRow(prompt(20 + i), 0, range(8 + 4 * i, 12 + 4 * i)) for i in range(10)]
    runner = ModelRunner(model, pool_of(model))
    whole = runner.run([BatchRow(ids, 0, range(4))], [50])
    for steps in ([50], [1] * 50, [7, 1, 30, 2, 10]):
        for crowd in ([], rows):
            runner = ModelRunner(model, pool_of(model))
            start = 0
            for count in steps:
                row = BatchRow(ids[start : start + count], start, range(4))
                logits = runner.run([*crowd, row], [0] * len(crowd) + [count])
                assert torch.equal(logits, whole[start : start + count])
                start += count


def test_layers_can_be_run_in_groups(tmp_path):
    model = load(tiny_model(tmp_path, num_hidden_layers=5))
    assert model.decoder is not None
    pool = pool_of(model)
    batch = pack([BatchRow(prompt(40), 0, range(3)), BatchRow((7,), 0, (9,))], [1, 1], pool)
    run = NativeRun(model.decoder)
    expected, whole = run.run(batch), pool.tensor.clone()
    pool.poison(range(64))
    for layers in (range(2), range(2, 3), range(3, 5)):
        logits = run.run_layers(batch, layers)
        done = pool.tensor[:3, : layers.stop, :, :, :8]  # 40 tokens end in the middle of the third block
        assert torch.equal(done, whole[:3, : layers.stop, :, :, :8])
        assert pool.tensor[:3, layers.stop :].isnan().all()
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("token_id", [VOCAB_SIZE, 2**40, -1])
def test_a_token_id_that_names_no_row_is_refused_before_any_is_read(token_id, tmp_path):
    model = load(tiny_model(tmp_path))
    runner = ModelRunner(model, pool_of(model))
    with pytest.raises(NativeError, match=f"outside the vocabulary of {VOCAB_SIZE}"):
        runner.run([BatchRow((3, token_id), 0, (0,)), BatchRow((7,), 0, (9,))], [1, 1])


def test_the_weights_are_held_once(tmp_path):
    folder = tiny_model(tmp_path, hidden_size=256, intermediate_size=512, num_hidden_layers=4)
    module = module_of(folder)
    size = sum(each.nbytes for each in module.parameters())
    model = load(folder)
    assert model.module is None
    assert model.decoder is not None
    tables = 2048 * 16 * 4  # cos and sin of every position
    assert size <= model.decoder.num_bytes <= 1.02 * size + tables
