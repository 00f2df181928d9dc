"""What a prompt or a step asks of a machine: operations and bytes, from the model's shape alone.

Of bytes only those count that no engine can leave out: each weight once a step, and each K and V once. So the
larger of operations over the matrix rate and bytes over the memory's rate is a time that none can beat.
"""

from __future__ import annotations

from dataclasses import dataclass


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


def prefill_work(shape: ModelShape, num_tokens: int, num_cached: int = 0) -> Work:
    """Of one prompt whose first tokens' K and V are there already, with the logits of its last token only."""
    attended = sum(
        _attended_by_all(num_tokens, window) - _attended_by_all(num_cached, window)
        for window in shape.windows
    )
    kept = num_tokens * len(shape.windows)
    return Work(
        operations=2 * ((num_tokens - num_cached) * shape.num_layer_weights + shape.num_head_weights)
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
