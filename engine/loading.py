"""A folder of weights → a model whose attention is ours, checked to be one that we can run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig

from engine.attention import ATTENTION_NAME, AttentionProbe
from engine.config import ModelConfig
from engine.errors import ModelError, UnsupportedModel
from engine.fingerprint import model_fingerprint
from engine.layout import DTYPES, KVLayout
from engine.rotary import check_rotary
from engine.weights import no_progress, resolve_model

_PROBE_TOKENS = 3


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
    """Raises ModelNotFound or UnsupportedModel; the message names what is missing."""
    folder = resolve_model(config.id, progress)
    hf_config = AutoConfig.from_pretrained(folder)
    device = _device(config.device)
    dtype = _dtype(config.dtype, hf_config, device)
    max_model_len = _max_model_len(config.max_model_len, hf_config)
    check_rotary(_rope_parameters(hf_config), _context(hf_config), max_model_len)
    progress(f"loading {config.id} as {dtype} on {device}")
    try:
        module = AutoModelForCausalLM.from_pretrained(
            folder, config=hf_config, dtype=DTYPES[dtype], attn_implementation=ATTENTION_NAME
        )
    except (KeyError, ValueError) as error:
        raise UnsupportedModel(f"{hf_config.model_type} cannot run with our attention: {error}") from error
    module.to(device)  # type: ignore[arg-type]  # transformers' decorator hides the method's own signature
    module.eval().requires_grad_(False)  # type: ignore[no-untyped-call]
    num_kv_heads, head_dim, vocab_size = _probe(module, hf_config, device)
    return LoadedModel(
        module=module,
        folder=folder,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=_eos_token_ids(folder, hf_config),
        num_layers=hf_config.num_hidden_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        fingerprint=model_fingerprint(folder, dtype),
    )


@torch.inference_mode()
def _probe(
    module: torch.nn.Module, hf_config: PreTrainedConfig, device: torch.device
) -> tuple[int, int, int]:
    """Runs a few tokens through the model with an attention that only takes notes: KV heads, head size
    and vocabulary. A layer that does not call it keeps its context elsewhere, where we could not reach it.
    """
    kind = hf_config.model_type
    probe = AttentionProbe()
    positions = torch.arange(_PROBE_TOKENS, device=device)[None]
    try:
        logits = module(
            input_ids=torch.zeros_like(positions),
            position_ids=positions,
            use_cache=False,
            logits_to_keep=torch.tensor([_PROBE_TOKENS - 1], device=device),
            paged_batch=probe,
        ).logits
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{kind}: {error}") from error
    except (TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise UnsupportedModel(f"{kind} cannot run on packed rows with our attention: {error}") from error
    missing = sorted(set(range(hf_config.num_hidden_layers)) - set(probe.shapes))
    if missing:
        raise UnsupportedModel(
            f"{kind}: layers {missing} do not call the attention interface: they are recurrent, "
            "or bring an attention of their own"
        )
    if len(set(probe.shapes.values())) != 1:
        raise UnsupportedModel(f"{kind}: layers differ in KV heads or head size: {probe.shapes}")
    if logits.shape[:2] != (1, 1):
        raise UnsupportedModel(f"{kind} does not give logits of chosen rows only")
    (num_kv_heads, head_dim) = probe.shapes[0]
    return num_kv_heads, head_dim, int(logits.shape[-1])


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
    found: int | list[int] | None = None
    if (folder / "generation_config.json").is_file():
        found = GenerationConfig.from_pretrained(folder).eos_token_id
    if found is None:
        found = hf_config.eos_token_id
    return frozenset([] if found is None else [found] if isinstance(found, int) else found)
