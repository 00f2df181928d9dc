"""What can be told of a model without its weights: its size, its KV's shape, whether we serve it.

The model is built on torch's meta device, where tensors have shapes and no memory, and run once with an
attention that only takes notes. What that cannot show (numbers: rows that mix outside the attention) is left
to loading.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from engine.attention import ATTENTION_NAME
from engine.attention_probe import AttentionProbe, LayerNotes
from engine.config import EngineConfig
from engine.errors import ModelError, ModelNotFound, UnsupportedModel, first_line
from engine.layout import DTYPES, KVLayout
from engine.model_files import check_folder
from engine.rotary import check_rotary
from engine.safetensors_file import read_entries
from engine.weights import PACKAGED_HUB_ID, PACKAGED_MODEL, packaged_gguf

_NUM_TOKENS = 3
# What a model's code raises where it looks at numbers: there are none on the meta device.
_NEEDS_NUMBERS = (RuntimeError, TypeError, ValueError, AttributeError, LookupError)
# Python, torch, transformers, gRPC and Ray's worker code in one process, before any weight: measured.
PROCESS_BYTES = 460 * 2**20


@dataclass(frozen=True, slots=True)
class ModelFacts:
    kind: str  # config.json's model_type
    num_weights: int
    stored_dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    context: int | None

    def dtype(self, wanted: str, is_cuda: bool) -> str:
        """As loading decides it."""
        if wanted != "auto":
            return wanted
        if self.stored_dtype == "float16" and not is_cuda:
            return "bfloat16"
        return self.stored_dtype if self.stored_dtype in DTYPES else "float32"

    def weights_bytes(self, dtype: str) -> int:
        return self.num_weights * DTYPES[dtype].itemsize

    def layout(self, block_size: int, dtype: str) -> KVLayout:
        return KVLayout(self.num_layers, self.num_kv_heads, self.head_dim, block_size, dtype, "")

    def working_bytes(self, config: EngineConfig, dtype: str) -> int:
        """A step's tensors at most, roughly: what one layer holds at once, and the logits in float32 with
        their probabilities and noise. Allocators keep about twice that: measured.
        """
        row = 6 * self.hidden_size + 3 * self.intermediate_size
        layer = config.max_num_batched_tokens * row * DTYPES[dtype].itemsize
        num_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
        return 2 * (layer + num_rows * self.vocab_size * 4 * 3)


def locate_model(model_id: str) -> Path | None:
    """The model's folder or .gguf file, without asking the network; None: it is not on this machine."""
    path = Path(model_id).expanduser()
    if path.is_dir() or path.suffix == ".gguf":
        return path
    packaged = packaged_gguf() if model_id == PACKAGED_MODEL else None
    if packaged is not None:
        return packaged
    hub_id = PACKAGED_HUB_ID if model_id == PACKAGED_MODEL else model_id
    try:
        return Path(snapshot_download(hub_id, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError):
        return None


def read_facts(path: Path, max_model_len: int | None) -> ModelFacts:
    """Of a folder or a .gguf file. Raises ModelError: a file that is missing or broken, an architecture that
    is not served, or a context that it does not have.
    """
    if path.is_dir():
        check_folder(path)
        config, num_weights, stored_dtype = _config(path), _num_weights(path), None
    else:
        num_weights = _num_gguf_weights(path)
        config, stored_dtype = _config(path.parent, path.name), "bfloat16"  # what it is converted to
    text = config.get_text_config()
    context = getattr(text, "max_position_embeddings", None)  # not every family names one
    _check_context(config, context if isinstance(context, int) else None, max_model_len)
    notes = _layers(config)
    if notes is None:
        heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
        head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    else:
        heads, head_dim = notes[0].num_kv_heads, notes[0].head_dim
    return ModelFacts(
        kind=str(config.model_type),
        num_weights=num_weights,
        stored_dtype=stored_dtype or str(config.dtype or torch.float32).removeprefix("torch."),
        num_layers=int(text.num_hidden_layers),
        num_kv_heads=heads,
        head_dim=head_dim,
        hidden_size=int(text.hidden_size),
        intermediate_size=int(getattr(text, "intermediate_size", None) or 4 * text.hidden_size),
        vocab_size=int(text.vocab_size),
        context=context if isinstance(context, int) else None,
    )


def _num_weights(folder: Path) -> int:
    counts = (
        torch.Size(entry.shape).numel()
        for path in sorted(folder.glob("*.safetensors"))
        for entry in read_entries(path).values()
    )
    return sum(counts)


def _num_gguf_weights(path: Path) -> int:
    if not path.is_file():
        raise ModelNotFound(f"there is no file {path}")
    try:
        from gguf import GGUFReader  # an extra

        from engine.gguf_file import check_gguf
    except ImportError as error:
        raise ModelError("reading a .gguf file takes: pip install 'pdserve[gguf]'") from error
    check_gguf(path)
    return sum(int(tensor.n_elements) for tensor in GGUFReader(path).tensors)


def _config(folder: Path, gguf_file: str | None = None) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, gguf_file=gguf_file)
    except Exception as error:  # every family's config checks itself in its own way
        source, reason = folder / (gguf_file or "config.json"), first_line(error)
        raise UnsupportedModel(f"transformers cannot use {source}: {reason}") from error
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{config.model_type} is an encoder-decoder model; decoders are served here")
    return config


def _check_context(config: PreTrainedConfig, context: int | None, max_model_len: int | None) -> None:
    if context is not None and max_model_len is not None and max_model_len > context:
        raise ModelError(f"max_model_len {max_model_len} is more than the model's context of {context}")
    rope = getattr(config, "rope_parameters", None)  # not every family has them
    check_rotary(rope or {}, context, max_model_len or context or 0)


@torch.inference_mode()
def _layers(config: PreTrainedConfig) -> Mapping[int, LayerNotes] | None:
    """None where the model cannot be run without numbers. Raises UnsupportedModel."""
    kind = config.model_type
    try:
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, attn_implementation=ATTENTION_NAME
            )
    except KeyError as error:
        if error.args != (ATTENTION_NAME,):
            raise UnsupportedModel(f"{kind} cannot be built: {error} is missing") from error
        raise UnsupportedModel(
            f"{kind} brings attentions of its own, chosen by name, and does not call the attention interface"
        ) from error
    except Exception as error:  # the family's own code
        raise UnsupportedModel(f"{kind} cannot run with our attention: {first_line(error)}") from error
    probe = AttentionProbe(watched_row=0)
    positions = torch.arange(_NUM_TOKENS, device="meta")[None]
    try:
        module.eval()(
            input_ids=positions, position_ids=positions, use_cache=False, logits_to_keep=1, paged_batch=probe
        )
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{kind}: {error}") from error
    except _NEEDS_NUMBERS:
        return None
    missing = sorted(set(range(config.get_text_config().num_hidden_layers)) - set(probe.layers))
    if missing:
        raise UnsupportedModel(
            f"{kind}: layers {missing} do not call the attention interface: they are recurrent, or bring an "
            "attention of their own"
        )
    return probe.layers


def gpu_memory_bytes() -> tuple[int, ...]:
    """Of each GPU that torch finds on this machine."""
    count = torch.cuda.device_count()
    return tuple(int(torch.cuda.get_device_properties(index).total_memory) for index in range(count))
