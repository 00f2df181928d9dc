"""Paged attention for a packed step, under the name that transformers' models ask for.

K and V of the step's tokens are written to the pool. A kernel attends where there is one; here in torch,
decoding rows are done together, grouped by query heads that share a KV head, and each chunk by itself, in
tiles of query rows over the keys it can see. Slots of the pool that were never written may hold NaN: no
arithmetic touches them. `engine/attention_reference.py` says the same slowly.
"""

from __future__ import annotations

import torch
from transformers import AttentionInterface

from engine.attention_kernel import AttentionKernel
from engine.attention_probe import AttentionProbe
from engine.attention_rules import AttentionRules
from engine.batch import DecodeGroup, PagedBatch, PrefillRows
from engine.errors import UnsupportedModel
from engine.layer_watch import LayerWatch
from engine.progress import Progress

ATTENTION_NAME = "pdserve_paged"
_QUERY_TILE = 128


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged_batch: PagedBatch | AttentionProbe | None = None,
    attention_kernel: AttentionKernel | None = None,
    layer_watch: LayerWatch | None = None,
    progress: Progress | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """query [1, Hq, T, D], key and value [1, H, T, D] → [1, T, Hq, D]."""
    layer = int(module.layer_idx)  # type: ignore[arg-type]  # every caller of the interface has one
    if paged_batch is None:
        raise UnsupportedModel("the model does not pass keyword arguments on to its attention")
    if isinstance(paged_batch, AttentionProbe):
        others["attention_mask"] = attention_mask
        others.setdefault("is_causal", getattr(module, "is_causal", True))
        paged_batch.note(layer, query, key, value, sliding_window, others)
        return torch.zeros_like(query).transpose(1, 2), None
    rules = AttentionRules(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    attended = attend(paged_batch, layer, query[0], key[0], value[0], rules, attention_kernel)
    if progress is not None:
        progress.moved()
    if layer_watch is not None and layer + 1 in layer_watch.stops:
        layer_watch.tell(layer + 1)
    return attended[None], None


AttentionInterface.register(ATTENTION_NAME, paged_attention)


def attend(
    batch: PagedBatch,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rules: AttentionRules,
    kernel: AttentionKernel | None = None,
) -> torch.Tensor:
    """query [Hq, T, D], key and value [H, T, D] → [T, Hq, D]; writes key and value to the pool first."""
    if kernel is not None and kernel.can_attend(query, batch.pool, rules):
        return kernel.attend(batch, layer, query, key, value, rules)
    write_cells(batch.pool, batch.cells, layer, key, value)
    out = query.new_empty(query.shape[1], query.shape[0], query.shape[2])
    query = query * rules.scaling
    for group in batch.decodes:
        out[group.first : group.last] = _decode(
            batch, layer, group, query[:, group.first : group.last], rules
        )
    for rows in batch.prefills:
        _prefill(batch, layer, rows, query[:, rows.first : rows.last], rules, out[rows.first : rows.last])
    return out


def write_cells(
    pool: torch.Tensor, cells: torch.Tensor, layer: int, key: torch.Tensor, value: torch.Tensor
) -> None:
    """key and value [H, T, D] to one layer's cells; `cells` [H·T] are those of K in layer 0."""
    _, _, _, num_heads, block_size, head_dim = pool.shape
    flat = pool.view(-1, head_dim)
    cells = cells + layer * 2 * num_heads * block_size
    flat.index_copy_(0, cells, key.reshape(-1, head_dim))
    flat.index_copy_(0, cells + num_heads * block_size, value.reshape(-1, head_dim))


def _read_kv(batch: PagedBatch, layer: int, block_rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., W] block rows → K and V [..., W·B, D], copied."""
    _, _, _, num_heads, block_size, head_dim = batch.pool.shape
    flat = batch.pool.view(-1, block_size * head_dim)
    k_rows = (block_rows + layer * 2 * num_heads).flatten()
    shape = (*block_rows.shape[:-1], -1, head_dim)
    key = flat.index_select(0, k_rows).view(shape)
    value = flat.index_select(0, k_rows + num_heads).view(shape)
    return key, value


def _decode(
    batch: PagedBatch, layer: int, group: DecodeGroup, query: torch.Tensor, rules: AttentionRules
) -> torch.Tensor:
    """query [Hq, S, D] → [S, Hq, D]."""
    num_query_heads, num_seqs, head_dim = query.shape
    num_heads = batch.pool.shape[3]
    key, value = _read_kv(batch, layer, group.block_rows)  # [S, H, C, D]
    if group.unwritten.numel():
        value.view(-1, head_dim).index_fill_(0, group.unwritten, 0)
    grouped = query.transpose(0, 1).reshape(num_seqs, num_heads, -1, head_dim)
    scores = _capped(grouped @ key.transpose(2, 3), rules)  # [S, H, G, C]
    scores.masked_fill_(group.padding, -torch.inf)
    if rules.sliding_window is not None:
        columns = torch.arange(scores.shape[-1], device=scores.device)
        is_past = columns < (group.context_lens - rules.sliding_window)[:, None]
        scores.masked_fill_(is_past[:, None, None, :], -torch.inf)
    weights = _softmax(scores, None if rules.sinks is None else rules.sinks.view(num_heads, -1, 1))
    return (weights @ value).view(num_seqs, num_query_heads, head_dim)


def _prefill(
    batch: PagedBatch,
    layer: int,
    rows: PrefillRows,
    query: torch.Tensor,
    rules: AttentionRules,
    out: torch.Tensor,
) -> None:
    """query [Hq, n, D]; fills out [n, Hq, D]."""
    num_heads = batch.pool.shape[3]
    head_dim = query.shape[-1]
    key, value = _read_kv(batch, layer, rows.block_rows)  # [H, W·B, D]
    grouped = query.view(num_heads, -1, query.shape[1], head_dim)  # [H, G, n, D]
    sinks = None if rules.sinks is None else rules.sinks.view(num_heads, -1, 1, 1)
    start = rows.context_len - query.shape[1]
    for first in range(0, query.shape[1], _QUERY_TILE):
        last = min(first + _QUERY_TILE, query.shape[1])
        begin = 0
        if rules.sliding_window is not None:
            begin = max(0, start + first + 1 - rules.sliding_window)
        end = start + last
        tile = grouped[:, :, first:last].reshape(num_heads, -1, head_dim)
        scores = _capped(tile @ key[:, begin:end].transpose(1, 2), rules)
        scores = scores.view(num_heads, -1, last - first, end - begin)
        _mask_tile(scores, begin, end, rules.sliding_window)
        weights = _softmax(scores, sinks).view(num_heads, -1, end - begin)
        result = (weights @ value[:, begin:end]).view(-1, last - first, head_dim)
        out[first:last] = result.transpose(0, 1)


def _mask_tile(scores: torch.Tensor, begin: int, end: int, window: int | None) -> None:
    """scores [H, G, n, end-begin] of the queries at the n positions before `end`, against the keys from
    `begin` on: takes away, in place, keys behind a query and those that its window has left.
    """
    num_queries = scores.shape[2]
    positions = torch.arange(end - num_queries, end, device=scores.device)
    is_behind = positions > positions[:, None]
    scores[..., -num_queries:].masked_fill_(is_behind, -torch.inf)
    if window is not None:
        keys = torch.arange(begin, end, device=scores.device)
        scores.masked_fill_(keys <= positions[:, None] - window, -torch.inf)


def _capped(scores: torch.Tensor, rules: AttentionRules) -> torch.Tensor:
    return scores if rules.softcap is None else torch.tanh(scores / rules.softcap) * rules.softcap


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Over the last axis; torch sums in float32 whatever the dtype. `sinks` has a last axis of 1."""
    if sinks is None:
        return torch.softmax(scores, -1)
    with_sink = torch.cat((scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)), -1)
    return torch.softmax(with_sink, -1)[..., :-1]
