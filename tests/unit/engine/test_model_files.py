"""A model's folder that lacks something, or holds something broken: refused by the file's name."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from engine.config import ModelConfig
from engine.errors import BrokenModel, ModelError, ModelNotFound, UnsupportedModel
from engine.loading import load_model
from engine.model_files import check_folder
from engine.safetensors_file import read_entries
from engine.weights import resolve_model
from tests.models import tiny_model

JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model(tmp_path)


def load(folder: Path) -> None:
    load_model(ModelConfig(id=str(folder), device="cpu"))


def rewrite(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_folder_that_lacks_a_file_is_refused_by_its_name(missing, folder):
    (folder / missing).unlink()
    with pytest.raises(ModelNotFound, match=missing.removeprefix("model")):
        resolve_model(str(folder))


@pytest.mark.parametrize("model_id", ["/nowhere/model.gguf", "not a hub id", "/nowhere"])
def test_an_id_with_nothing_behind_it_is_not_found(model_id):
    with pytest.raises(ModelNotFound, match=model_id):
        resolve_model(model_id)


@pytest.mark.parametrize("name", JSON_FILES)
@pytest.mark.parametrize("content", ['{"a": ', "", "\x00\x01", "[1, 2]", "null"])
def test_a_file_that_is_no_json_object_is_named(name, content, folder):
    (folder / name).write_text(content)
    with pytest.raises(BrokenModel, match=f"{folder.name}/{name} (is not JSON|holds no JSON object)"):
        resolve_model(str(folder))


@pytest.mark.parametrize("content", ['{"version": "1.0"}', '{"model": {"type": "Nonsense"}}'])
def test_a_tokenizer_file_without_a_tokenizer_is_named(content, folder):
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(BrokenModel, match=r"tokenizer\.json describes no tokenizer: .") as caught:
        resolve_model(str(folder))
    assert "\n" not in str(caught.value)


def test_entries_are_what_the_file_holds(folder):
    tensors = load_file(folder / "model.safetensors")
    entries = read_entries(folder / "model.safetensors")
    assert {name: entry.shape for name, entry in entries.items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    assert all(entry.end - entry.begin == tensors[name].nbytes for name, entry in entries.items())


@pytest.mark.parametrize(
    "hurt",
    [
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: data[:100],
        lambda data: data[:5],
        lambda _: b"",
        lambda data: data + b"\0",
        lambda data: struct.pack("<Q", 2**62) + data[8:],
        lambda data: data[:8] + b"{]" + data[10:],
        lambda _: struct.pack("<Q", 2) + b"[]",
        lambda _: struct.pack("<Q", 8) + b'{"a": 1}',
        lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n",
    ],
)
def test_safetensors_that_are_not_whole_are_named(hurt: Callable[[bytes], bytes], folder):
    path = folder / "model.safetensors"
    path.write_bytes(hurt(path.read_bytes()))
    with pytest.raises(BrokenModel, match=r"/model\.safetensors (is|has) "):
        resolve_model(str(folder))


def test_a_file_that_leads_nowhere_is_named(folder):
    path = folder / "model.safetensors"
    path.unlink()
    path.symlink_to(folder / "gone")
    with pytest.raises(BrokenModel, match=r"/model\.safetensors cannot be read: No such file"):
        resolve_model(str(folder))


def test_an_end_of_text_that_is_no_id_is_named(folder):
    rewrite(folder / "generation_config.json", eos_token_id="</s>")
    with pytest.raises(BrokenModel, match=r"generation_config\.json: eos_token_id is '</s>'"):
        load(folder)


def shard(folder: Path) -> list[Path]:
    """The same weights in two files and an index."""
    tensors = list(load_file(folder / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    parts = {f"model-{n}-of-2.safetensors": dict(tensors[n::2]) for n in range(2)}
    for name, part in parts.items():
        save_file(part, folder / name, metadata={"format": "pt"})
    weight_map = {tensor: name for name, part in parts.items() for tensor in part}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return [folder / name for name in parts]


def test_a_missing_shard_is_named(folder):
    first, _ = shard(folder)
    load(folder)
    first.unlink()
    with pytest.raises(BrokenModel, match=f"{first.name} is missing"):
        check_folder(folder)
    rewrite(folder / "model.safetensors.index.json", weight_map=None)
    with pytest.raises(BrokenModel, match="no weight_map"):
        check_folder(folder)


def test_weights_that_are_missing_are_no_random_numbers(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    lost = next(name for name in tensors if "q_proj" in name)
    save_file({n: t for n, t in tensors.items() if n != lost}, path, metadata={"format": "pt"})
    with pytest.raises(BrokenModel, match=f"lack 1 tensors.*{lost}"):
        load(folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "no_such_family"},
        {"model_type": None},
        {"num_hidden_layers": "many"},
        {"rope_parameters": {"rope_type": "no such rope", "rope_theta": 1.0}},
        {"hidden_size": 96},  # not the weights'
        {"num_attention_heads": 0},
        {"hidden_act": "no such function"},
    ],
)
def test_a_config_that_no_model_can_be_made_of_is_refused_in_one_line(fields, folder):
    rewrite(folder / "config.json", **fields)
    with pytest.raises(ModelError) as caught:
        load(folder)
    message = str(caught.value)
    assert str(folder) in message
    assert "\n" not in message
    assert len(message) < 600


def test_an_encoder_decoder_model_is_refused_by_name(folder):
    rewrite(folder / "config.json", model_type="t5")
    with pytest.raises(UnsupportedModel, match="t5 is an encoder-decoder"):
        load(folder)
