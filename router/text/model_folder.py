"""What the router reads of a model: its folder's small JSON files, once, at the start. No weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from pdserve.v1 import generation_pb2
from router.text.model_shape import read_model_shape


class ModelFolderError(Exception):
    """The folder lacks something that the router needs; says what and where."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    tokenizer: Tokenizer
    vocab_size: int
    # The longest sequence that the model was made for; None where its config names none.
    max_positions: int | None
    dtype: str
    eos_token_ids: tuple[int, ...]
    chat_template: str | None
    # bos_token, eos_token, …: what a chat template may refer to.
    special_tokens: Mapping[str, str]
    # What a token costs; None where that is not known.
    shape: generation_pb2.ModelShape | None


def read_model_folder(folder: Path) -> ModelFolder:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelFolderError(f"no tokenizer.json in {folder}")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    config = _read_json(folder / "config.json")
    text_config = _mapping(config.get("text_config")) or config
    tokenizer_config = _read_json(folder / "tokenizer_config.json")
    generation = _read_json(folder / "generation_config.json")
    return ModelFolder(
        tokenizer=tokenizer,
        vocab_size=_integer(text_config, "vocab_size") or tokenizer.get_vocab_size(),
        max_positions=_integer(text_config, "max_position_embeddings")
        or _integer(text_config, "n_positions"),
        dtype=str(text_config.get("dtype") or text_config.get("torch_dtype") or ""),
        eos_token_ids=_ids(generation.get("eos_token_id")) or _ids(text_config.get("eos_token_id")),
        chat_template=_chat_template(folder, tokenizer_config),
        special_tokens=_special_tokens(folder, tokenizer_config),
        shape=read_model_shape(folder, text_config),
    )


def _read_json(path: Path) -> Mapping[str, object]:
    if not path.is_file():
        return {}
    try:
        return _mapping(json.loads(path.read_bytes()))
    except ValueError as error:
        raise ModelFolderError(f"{path} is not JSON: {error}") from error


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _integer(config: Mapping[str, object], name: str) -> int | None:
    value = config.get(name)
    return value if isinstance(value, int) else None


def _ids(value: object) -> tuple[int, ...]:
    """An id, a list of ids, or nothing."""
    values = value if isinstance(value, list) else [value]
    return tuple(each for each in values if isinstance(each, int))


def _chat_template(folder: Path, tokenizer_config: Mapping[str, object]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    value = tokenizer_config.get("chat_template")
    # Several named templates: the one for plain chats is called "default".
    for entry in value if isinstance(value, list) else ():
        if _mapping(entry).get("name") == "default":
            value = _mapping(entry).get("template")
    return value if isinstance(value, str) else None


def _special_tokens(folder: Path, tokenizer_config: Mapping[str, object]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for source in (_read_json(folder / "special_tokens_map.json"), tokenizer_config):
        for name, value in source.items():
            text = _mapping(value).get("content", value)
            if name.endswith("_token") and isinstance(text, str):
                tokens[name] = text
    return tokens
