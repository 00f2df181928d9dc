"""Are the files of a model's folder there, and whole? Cheap: headers and sizes, not weights, and no torch.

What another library would say of a broken file names neither the file nor the fault, so it is not asked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer

from engine.errors import BrokenModel, ModelNotFound, first_line
from engine.safetensors_file import read_entries

_WANTED = ("config.json", "*.safetensors", "tokenizer.json")
_JSON_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
)
_INDEX = "model.safetensors.index.json"


def check_folder(folder: Path) -> None:
    """ModelNotFound for a file that is missing, BrokenModel for one that is not whole."""
    for wanted in _WANTED:
        if not any(folder.glob(wanted)):
            raise ModelNotFound(f"the folder {folder} has no {wanted}")
    for name in _JSON_FILES:
        if (folder / name).exists():
            read_json(folder / name)
    _check_tokenizer(folder / "tokenizer.json")
    for path in sorted(folder.glob("*.safetensors")):
        read_entries(path)
    if (folder / _INDEX).exists():
        _check_index(folder)


def _check_tokenizer(path: Path) -> None:
    """The router will read it, in a process of its own, when all else has been started."""
    try:
        Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise BrokenModel(f"{path} describes no tokenizer: {first_line(error)}") from error


def read_json(path: Path) -> Mapping[str, object]:
    """BrokenModel if it is no JSON object."""
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise BrokenModel(f"{path} is not JSON: {error}") from error
    except OSError as error:
        raise BrokenModel(f"{path} cannot be read: {error.strerror}") from error
    if not isinstance(value, dict):
        raise BrokenModel(f"{path} holds no JSON object")
    return value


def _check_index(folder: Path) -> None:
    shards = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(shards, dict):
        raise BrokenModel(f"{folder / _INDEX} has no weight_map")
    for name in sorted({str(name) for name in shards.values()}):
        if not (folder / name).is_file():
            raise BrokenModel(f"{folder / name} is missing: {_INDEX} names it")
