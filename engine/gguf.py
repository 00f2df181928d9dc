"""A GGUF file → a folder of safetensors, by transformers' own reader. Takes many seconds."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

from engine.errors import ModelError, UnsupportedModel, first_line


def write_folder(path: Path, folder: Path) -> None:
    """Weights in bfloat16, tokenizer, chat template and generation config. Raises ModelError."""
    source, name = str(path.parent), path.name
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
        model = AutoModelForCausalLM.from_pretrained(
            source,
            gguf_file=name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
    except Exception as error:  # readers of many architectures and vocabularies, each with ways to fail
        raise UnsupportedModel(f"transformers cannot read {path}: {first_line(error)}") from error
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=model.config.bos_token_id,
        eos_token_id=_eos_token_ids(tokenizer.eos_token_id, model.config.eos_token_id),
        pad_token_id=model.config.pad_token_id,
    )
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path.name} as converted cannot be written to {folder.parent}: {error}") from error


def _eos_token_ids(*found: int | list[int] | None) -> list[int]:
    """What ends a turn by the tokenizer and by the config: in a GGUF file only one of them may be right."""
    ids: set[int] = set()
    for item in found:
        ids.update([] if item is None else [item] if isinstance(item, int) else item)
    return sorted(ids)
