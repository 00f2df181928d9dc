"""What the router counts of a model's weights is what the engine has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.config import ModelConfig
from engine.loading import load_model
from pdserve.bench.limits import read_shape
from router.text.model_folder import read_model_folder
from tests.models import tiny_model


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2"])
def test_the_shape_is_the_engines(tmp_path: Path, family: str) -> None:
    folder = tiny_model(tmp_path, family)
    layout = load_model(ModelConfig(id=str(folder), device="cpu", compile="off")).layout(16)
    expected, seen = read_shape(folder, layout), read_model_folder(folder).shape
    assert expected is not None
    assert seen is not None
    assert seen.num_layer_weights == expected.num_layer_weights
    assert seen.num_head_weights == expected.num_head_weights
    assert (seen.num_query_heads, seen.num_kv_heads, seen.head_dim) == (
        expected.num_query_heads,
        expected.num_kv_heads,
        expected.head_dim,
    )
    assert [window or None for window in seen.windows] == list(expected.windows)


def test_a_window_that_is_not_used_is_none(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "qwen2")
    config = json.loads((folder / "config.json").read_text())
    config.pop("layer_types", None)  # as in older models
    for is_used, width in ((True, 5), (False, 0)):
        told = config | {"sliding_window": 5, "use_sliding_window": is_used}
        (folder / "config.json").write_text(json.dumps(told))
        shape = read_model_folder(folder).shape
        assert shape is not None
        assert set(shape.windows) == {width}


def test_a_model_that_uses_some_of_its_weights_for_a_token_has_none(tmp_path: Path) -> None:
    assert read_model_folder(tiny_model(tmp_path, "qwen3_moe")).shape is None


def test_a_folder_without_weights_or_with_broken_ones_has_none(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    (weights,) = folder.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:100])
    assert read_model_folder(folder).shape is None
    weights.unlink()
    assert read_model_folder(folder).shape is None
    config = json.loads((folder / "config.json").read_text())
    del config["num_attention_heads"]
    (folder / "config.json").write_text(json.dumps(config))
    assert read_model_folder(folder).shape is None
