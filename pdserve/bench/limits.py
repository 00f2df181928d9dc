"""What a row asks of a machine: operations and bytes, from the model's shape alone.

Of bytes only those count that no engine can leave out: each weight once a step, and each K and V once. So the
larger of operations over the matrix rate and bytes over the memory's rate is a time that none can beat.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.architecture import read_config
from engine.layout import DTYPES, KVLayout
from engine.safetensors_file import read_entries
from pdserve.bench.rows import Phase, Plan, Row


@dataclass(frozen=True, slots=True)
class ModelShape:
    num_layer_weights: int  # all but the embedding and the head
    num_head_weights: int  # what makes logits of a token; may be the embedding itself
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]  # of each layer: tokens that it attends to at most
    itemsize: int  # bytes of a weight, and of an element of K or V


@dataclass(frozen=True, slots=True)
class Work:
    operations: float
    num_bytes: float


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine does in a second."""

    operations: float  # of a matrix product
    num_bytes: float  # read from memory


def row_work(shape: ModelShape, row: Row, plan: Plan) -> Work:
    """A prefill's, or that of one step of decoding."""
    if row.phase is Phase.PREFILL:
        return prefill_work(shape, row.context)
    return decode_work(shape, row.batch, plan.mean_context(row))


def prefill_work(shape: ModelShape, num_tokens: int) -> Work:
    """Of one prompt, with the logits of its last token only."""
    attended = sum(_attended_by_all(num_tokens, window) for window in shape.windows)
    kept = num_tokens * len(shape.windows)
    return Work(
        operations=2 * (num_tokens * shape.num_layer_weights + shape.num_head_weights)
        + _attention_operations(shape, attended),
        num_bytes=_weight_bytes(shape) + _kv_bytes(shape, kept),
    )


def decode_work(shape: ModelShape, batch: int, context: float) -> Work:
    """Of one step: a token for each of `batch` sequences that have `context` tokens, the new one included."""
    attended = batch * sum(context if window is None else min(context, window) for window in shape.windows)
    return Work(
        operations=2 * batch * (shape.num_layer_weights + shape.num_head_weights)
        + _attention_operations(shape, attended),
        num_bytes=_weight_bytes(shape) + _kv_bytes(shape, attended),
    )


def is_memory_bound(work: Work, rates: Rates) -> bool:
    return work.num_bytes / rates.num_bytes > work.operations / rates.operations


def limit_s(work: Work, rates: Rates) -> float:
    return max(work.operations / rates.operations, work.num_bytes / rates.num_bytes)


def read_shape(folder: Path, layout: KVLayout) -> ModelShape | None:
    """Of the model in a folder of safetensors; None where not every weight takes part in every token."""
    config = read_config(folder).get_text_config()
    shapes = {
        name: torch.Size(entry.shape)
        for path in sorted(folder.glob("*.safetensors"))
        for name, entry in read_entries(path).items()
    }
    head = torch.Size((config.vocab_size, config.hidden_size))
    if _has_experts(shapes) or head not in shapes.values():
        return None
    return ModelShape(
        num_layer_weights=sum(shape.numel() for shape in shapes.values() if shape != head),
        num_head_weights=head.numel(),
        num_query_heads=int(config.num_attention_heads),
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        windows=_windows(
            getattr(config, "sliding_window", None), getattr(config, "layer_types", None), layout.num_layers
        ),
        itemsize=DTYPES[layout.dtype].itemsize,
    )


def _has_experts(names: Iterable[str]) -> bool:
    return any(".experts." in name for name in names)


def _windows(window: object, kinds: object, num_layers: int) -> tuple[int | None, ...]:
    """Without kinds of layers, a window is every layer's."""
    width = window if isinstance(window, int) else None
    if not isinstance(kinds, list):
        return (width,) * num_layers
    return tuple(width if kind == "sliding_attention" else None for kind in kinds)


def _attended_by_all(num_tokens: int, window: int | None) -> int:
    """Pairs of a token and one that it attends to, in one causal prompt."""
    full = num_tokens if window is None else min(num_tokens, window)
    return full * (full + 1) // 2 + (num_tokens - full) * full


def _attention_operations(shape: ModelShape, attended: float) -> float:
    """Two products for each pair: the score, and the weighted V."""
    return 4 * attended * shape.num_query_heads * shape.head_dim


def _weight_bytes(shape: ModelShape) -> int:
    return (shape.num_layer_weights + shape.num_head_weights) * shape.itemsize


def _kv_bytes(shape: ModelShape, num_cells: float) -> float:
    """`num_cells`: tokens, counted once for each layer."""
    return num_cells * 2 * shape.num_kv_heads * shape.head_dim * shape.itemsize
