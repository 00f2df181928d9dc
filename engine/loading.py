"""A folder of weights → a model whose attention is ours, checked to be one that we can run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from engine.attention import ATTENTION_NAME
from engine.config import ModelConfig
from engine.errors import BrokenModel, ModelError, UnsupportedModel, first_line
from engine.fingerprint import model_fingerprint
from engine.layout import DTYPES, KVLayout
from engine.model_files import read_json
from engine.model_probe import probe_model
from engine.rotary import check_rotary
from engine.weights import no_progress, resolve_model


@dataclass(frozen=True, slots=True)
class LoadedModel:
    module: torch.nn.Module
    folder: Path
    device: torch.device
    dtype: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    fingerprint: str

    def layout(self, block_size: int) -> KVLayout:
        return KVLayout(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            dtype=self.dtype,
            model_fingerprint=self.fingerprint,
        )


def load_model(config: ModelConfig, progress: Callable[[str], None] = no_progress) -> LoadedModel:
    """Raises ModelError; the message names the file or what is missing."""
    folder = resolve_model(config.id, progress)
    hf_config = _config(folder)
    device = _device(config.device)
    dtype = _dtype(config.dtype, hf_config, device)
    max_model_len = _max_model_len(config.max_model_len, hf_config)
    check_rotary(_rope_parameters(hf_config), _context(hf_config), max_model_len)
    progress(f"loading {config.id} as {dtype} on {device}")
    module = _module(folder, hf_config, dtype)
    module.to(device)
    module.eval().requires_grad_(False)
    shape = probe_model(module, hf_config, device)
    return LoadedModel(
        module=module,
        folder=folder,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        vocab_size=shape.vocab_size,
        eos_token_ids=_eos_token_ids(folder, hf_config),
        num_layers=hf_config.num_hidden_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        fingerprint=model_fingerprint(folder, dtype),
    )


def _config(folder: Path) -> PreTrainedConfig:
    try:
        hf_config: PreTrainedConfig = AutoConfig.from_pretrained(folder)
    except Exception as error:  # every family's config checks itself in its own way
        reason = first_line(error)
        raise UnsupportedModel(f"transformers cannot use {folder / 'config.json'}: {reason}") from error
    if hf_config.is_encoder_decoder:
        raise UnsupportedModel(
            f"{hf_config.model_type} is an encoder-decoder model; decoders are served here"
        )
    return hf_config


def _module(folder: Path, hf_config: PreTrainedConfig, dtype: str) -> torch.nn.Module:
    kind = hf_config.model_type
    try:
        # With output_loading_info it gives a pair, which its annotations do not say.
        loaded: object = AutoModelForCausalLM.from_pretrained(
            folder,
            config=hf_config,
            dtype=DTYPES[dtype],
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
        )
    except KeyError as error:
        if error.args != (ATTENTION_NAME,):
            raise UnsupportedModel(f"{kind} in {folder} cannot be built: {error} is missing") from error
        raise UnsupportedModel(
            f"{kind} brings attentions of its own, chosen by name, and does not call the attention interface"
        ) from error
    except Exception as error:  # the family's own code, written for other attentions
        reason = first_line(error)
        raise UnsupportedModel(f"{kind} in {folder} cannot run with our attention: {reason}") from error
    module, report = cast("tuple[torch.nn.Module, Mapping[str, Collection[str]]]", loaded)
    missing = sorted(report["missing_keys"])
    if missing:  # transformers would fill them with random numbers
        raise BrokenModel(f"the weights in {folder} lack {len(missing)} tensors of {kind}, like {missing[0]}")
    return module


def _device(wanted: str) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise ModelError("device: cuda was asked for, and torch finds none here")
    return torch.device("cuda" if has_cuda and wanted != "cpu" else "cpu")


def _dtype(wanted: str, hf_config: PreTrainedConfig, device: torch.device) -> str:
    if wanted != "auto":
        return wanted
    stored = str(hf_config.dtype or torch.float32).removeprefix("torch.")
    if stored == "float16" and device.type == "cpu":
        return "bfloat16"  # CPUs compute float16 slowly where they do at all
    return stored if stored in DTYPES else "float32"


def _context(hf_config: PreTrainedConfig) -> int | None:
    value = _optional(hf_config, "max_position_embeddings")
    return value if isinstance(value, int) else None


def _rope_parameters(hf_config: PreTrainedConfig) -> Mapping[str, object]:
    value = _optional(hf_config, "rope_parameters")
    return value if isinstance(value, Mapping) else {}


def _max_model_len(wanted: int | None, hf_config: PreTrainedConfig) -> int:
    context = _context(hf_config)
    if context is None and wanted is None:
        raise ModelError(f"{hf_config.model_type} names no context length: set max_model_len")
    if context is not None and wanted is not None and wanted > context:
        raise ModelError(f"max_model_len {wanted} is more than the model's context of {context}")
    return wanted or context or 0


def _optional(hf_config: PreTrainedConfig, name: str) -> object:
    """Not every family's config has every key."""
    return getattr(hf_config, name, None)


def _eos_token_ids(folder: Path, hf_config: PreTrainedConfig) -> frozenset[int]:
    """generation_config.json knows a chat model's end of turn; config.json is the fallback."""
    path = folder / "generation_config.json"
    found = read_json(path).get("eos_token_id") if path.is_file() else None
    if found is None:
        path, found = folder / "config.json", hf_config.eos_token_id
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(isinstance(each, int) for each in ids):
        raise BrokenModel(f"{path}: eos_token_id is {found!r}, no token id and no list of them")
    return frozenset(ids)
