"""What a model's config says, and in which words we refuse it: to load it, or only to look at it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedConfig

from engine.attention import ATTENTION_NAME
from engine.errors import ModelError, UnsupportedModel, first_line
from engine.layout import DTYPES
from engine.rotary import check_rotary


def read_config(folder: Path, gguf_file: str | None = None) -> PreTrainedConfig:
    """Raises UnsupportedModel."""
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, gguf_file=gguf_file)
    except Exception as error:  # every family's config checks itself in its own way
        source, reason = folder / (gguf_file or "config.json"), first_line(error)
        raise UnsupportedModel(f"transformers cannot use {source}: {reason}") from error
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{config.model_type} is an encoder-decoder model; decoders are served here")
    return config


def context_of(config: PreTrainedConfig) -> int | None:
    """The longest sequence that the model was made for; None where its config names none."""
    value = _optional(config.get_text_config(), "max_position_embeddings")
    return value if isinstance(value, int) else None


def stored_dtype(config: PreTrainedConfig) -> str:
    return str(config.dtype or torch.float32).removeprefix("torch.")


def choose_dtype(wanted: str, stored: str, is_cuda: bool) -> str:
    """`wanted` "auto" is the checkpoint's own, where this machine computes it well."""
    if wanted != "auto":
        return wanted
    if stored == "float16" and not is_cuda:
        return "bfloat16"  # CPUs compute float16 slowly where they do at all
    return stored if stored in DTYPES else "float32"


def check_context(config: PreTrainedConfig, wanted: int | None) -> int | None:
    """The context to serve: `wanted`, or the model's own; None where neither is known. Raises ModelError."""
    context = context_of(config)
    if context is not None and wanted is not None and wanted > context:
        raise ModelError(f"max_model_len {wanted} is more than the model's context of {context}")
    served = wanted or context
    rope = _optional(config, "rope_parameters")
    check_rotary(rope if isinstance(rope, Mapping) else {}, context, served or 0)
    return served


@contextmanager
def building(name: str) -> Iterator[None]:
    """Around the making of a model with our attention: what goes wrong there becomes UnsupportedModel."""
    try:
        yield
    except KeyError as error:
        if error.args != (ATTENTION_NAME,):
            raise UnsupportedModel(f"{name} cannot be built: {error} is missing") from error
        raise UnsupportedModel(
            f"{name} brings attentions of its own, chosen by name, and does not call the attention interface"
        ) from error
    except Exception as error:  # the family's own code, written for other attentions
        raise UnsupportedModel(f"{name} cannot run with our attention: {first_line(error)}") from error


def check_every_layer_called(config: PreTrainedConfig, called: Mapping[int, object]) -> None:
    """Raises UnsupportedModel for layers whose attention (or what stands for it) is not the interface's."""
    missing = sorted(set(range(config.get_text_config().num_hidden_layers)) - set(called))
    if missing:
        raise UnsupportedModel(
            f"layers {missing} do not call the attention interface: they are recurrent, or bring an "
            "attention of their own"
        )


def _optional(config: PreTrainedConfig, name: str) -> object:
    """Not every family's config has every key."""
    return getattr(config, name, None)
