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
from transformers import AutoModelForCausalLM, PreTrainedConfig

from engine.architecture import (
    building,
    check_context,
    check_every_layer_called,
    choose_dtype,
    context_of,
    read_config,
    stored_dtype,
)
from engine.attention import ATTENTION_NAME
from engine.attention_probe import AttentionProbe, LayerNotes
from engine.config import EngineConfig
from engine.errors import ModelError, ModelNotFound, UnsupportedModel
from engine.layout import DTYPES, KVLayout
from engine.model_files import check_folder
from engine.safetensors_file import read_entries
from engine.weights import HUB_FILES, PACKAGED_HUB_ID, PACKAGED_MODEL, local_path, packaged_gguf

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
        return choose_dtype(wanted, self.stored_dtype, is_cuda)

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
    """The model's folder or .gguf file, without asking the network; None: it is not on this machine.

    Raises ModelNotFound for a path where there is nothing.
    """
    path = local_path(model_id)
    if path is not None:
        return path
    packaged = packaged_gguf() if model_id == PACKAGED_MODEL else None
    if packaged is not None:
        return packaged
    hub_id = PACKAGED_HUB_ID if model_id == PACKAGED_MODEL else model_id
    try:
        return Path(snapshot_download(hub_id, allow_patterns=HUB_FILES, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError):
        return None


def read_facts(path: Path, max_model_len: int | None) -> ModelFacts:
    """Of a folder or a .gguf file. Raises ModelError: a file that is missing or broken, an architecture that
    is not served, or a context that it does not have.
    """
    if path.is_dir():
        check_folder(path)
        config, num_weights = read_config(path), _num_weights(path)
        stored = stored_dtype(config)
    else:
        num_weights = _num_gguf_weights(path)
        config, stored = read_config(path.parent, path.name), "bfloat16"  # what it is converted to
    text = config.get_text_config()
    check_context(config, max_model_len)
    notes = _layers(config)
    if notes is None:
        heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
        head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    else:
        heads, head_dim = notes[0].num_kv_heads, notes[0].head_dim
    return ModelFacts(
        kind=str(config.model_type),
        num_weights=num_weights,
        stored_dtype=stored,
        num_layers=int(text.num_hidden_layers),
        num_kv_heads=heads,
        head_dim=head_dim,
        hidden_size=int(text.hidden_size),
        intermediate_size=int(getattr(text, "intermediate_size", None) or 4 * text.hidden_size),
        vocab_size=int(text.vocab_size),
        context=context_of(config),
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


@torch.inference_mode()
def _layers(config: PreTrainedConfig) -> Mapping[int, LayerNotes] | None:
    """None where the model cannot be run without numbers. Raises UnsupportedModel."""
    kind = config.model_type
    with building(str(kind)), torch.device("meta"):
        module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, attn_implementation=ATTENTION_NAME
        )
    probe = AttentionProbe(watched_row=0)
    positions = torch.arange(_NUM_TOKENS, device="meta")[None]
    try:
        module.eval()(
            input_ids=positions, position_ids=positions, use_cache=False, logits_to_keep=1, paged_batch=probe
        )
        check_every_layer_called(config, probe.layers)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{kind}: {error}") from error
    except _NEEDS_NUMBERS:
        return None
    return probe.layers


def gpu_memory_bytes() -> tuple[int, ...]:
    """Of each GPU that torch finds on this machine."""
    count = torch.cuda.device_count()
    return tuple(int(torch.cuda.get_device_properties(index).total_memory) for index in range(count))
