"""PyTorch's FlexAttention on the block-first pool, for GPUs: no K and no V is gathered.

The whole pool `[N, L, 2, H, B, D]` is one long list of keys to it: flat cells, seen from a layer's first K
cell on, and the same cells from its first V cell on. A cell has one index in both views and in every layer,
so what a step's rows see is said once for all layers: a list of the flat blocks of B cells that hold one KV
head (`kv_indices`), and a mask within them. Sequence and KV head together are FlexAttention's batch; the
query heads that share a KV head are its heads.

Its kernels (torch 2.13) count elements in 32 bits: from 2³¹ on they would read elsewhere, in silence.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, flex_attention

from engine.attention import write_cells
from engine.attention_rules import AttentionRules
from engine.batch import PagedBatch

Flex = Callable[..., object]

_MAX_ELEMENTS = 2**31
# Of queries that share a list of blocks: a multiple of every tile that FlexAttention may choose.
_QUERY_BLOCK = 128
# Keys that a kernel's tile has at most, and at least.
_MAX_KEY_TILE, _MIN_KEY_TILE = 64, 16
_MIN_HEAD_DIM = 16
# It is compiled for each kind of shape: one token or many, one list of blocks or several, windows.
_MAX_COMPILED = 64
# Dynamo takes a call meanwhile for a mistake, whichever thread it comes from.
_COMPILING = threading.Lock()


def why_no_flex(pool: torch.Tensor) -> str | None:
    """Why FlexAttention's kernels cannot attend to this pool; None where they can."""
    block_size, head_dim = pool.shape[4:]
    if pool.numel() > _MAX_ELEMENTS:
        size = f"{_MAX_ELEMENTS * pool.element_size() / 2**30:.0f} GiB"
        return f"the KV pool is larger than {size}, and FlexAttention counts its elements in 32 bits"
    if block_size < _MIN_KEY_TILE or block_size & (block_size - 1):
        return f"FlexAttention takes blocks of 16, 32, 64… tokens, and block_size is {block_size}"
    if head_dim < _MIN_HEAD_DIM:
        return f"FlexAttention takes heads of 16 and more, and the model's are of {head_dim}"
    return None


def compiled_flex() -> Flex:
    """Uncompiled, FlexAttention would score every cell of the pool: better an error, hence `fullgraph`."""
    torch._dynamo.config.recompile_limit = max(_MAX_COMPILED, torch._dynamo.config.recompile_limit)
    compiled = cast("Flex", torch.compile(flex_attention, fullgraph=True))

    def flex(*arguments: object, **options: object) -> object:
        with _COMPILING:  # in a worker nobody waits here: it has one engine
            return compiled(*arguments, **options)

    return flex


@dataclass(frozen=True, slots=True)
class FlexRows:
    """Rows `[first, last)` of a step: S sequences of n tokens each. The tensors are on the pool's device."""

    first: int
    last: int
    block_tables: torch.Tensor  # [S, W]; what is behind a context names any block
    context_lens: torch.Tensor  # [S], new tokens included
    masks: dict[int | None, BlockMask] = field(default_factory=dict)  # made so far, by window

    def mask(self, pool: torch.Tensor, window: int | None) -> BlockMask:
        if window not in self.masks:
            self.masks[window] = _block_mask(pool, self, window)
        return self.masks[window]


class FlexAttention:
    """An AttentionKernel for one step."""

    def __init__(self, flex: Flex, cells: torch.Tensor, rows: Sequence[FlexRows]) -> None:
        """`cells` [H·T]: where the step's K goes in layer 0, as in PagedBatch."""
        self._flex = flex
        self._cells = cells
        self.rows = rows

    def can_attend(self, query: torch.Tensor, pool: torch.Tensor, rules: AttentionRules) -> bool:
        return query.dtype is pool.dtype

    def attend(
        self,
        batch: PagedBatch,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rules: AttentionRules,
    ) -> torch.Tensor:
        write_cells(batch.pool, self._cells, layer, key, value)
        out = query.new_empty(query.shape[1], query.shape[0], query.shape[2])
        for rows in self.rows:
            own = query[:, rows.first : rows.last]
            out[rows.first : rows.last] = self._attend(batch.pool, layer, rows, own, rules)
        return out

    def _attend(
        self, pool: torch.Tensor, layer: int, rows: FlexRows, query: torch.Tensor, rules: AttentionRules
    ) -> torch.Tensor:
        """query [Hq, S·n, D] → [S·n, Hq, D]."""
        _, num_rows, head_dim = query.shape
        num_heads, num_seqs = pool.shape[3], len(rows.context_lens)
        split = query.view(num_heads, -1, num_seqs, num_rows // num_seqs, head_dim)  # [H, G, S, n, D]
        batched = split.permute(2, 0, 1, 3, 4).flatten(0, 1)  # [S·H, G, n, D]
        keys, values = _layer_views(pool, layer)
        result = self._flex(
            batched,
            keys,
            values,
            score_mod=None if rules.softcap is None else _softcap(rules.softcap),
            block_mask=rows.mask(pool, rules.sliding_window),
            scale=rules.scaling,
            enable_gqa=True,
            kernel_options={"BLOCK_N": min(pool.shape[4], _MAX_KEY_TILE)},
            return_aux=None if rules.sinks is None else AuxRequest(lse=True),
        )
        if rules.sinks is None:
            attended = cast("torch.Tensor", result)
        else:
            attended = _with_sinks(result, rules.sinks.view(num_heads, -1, 1).repeat(num_seqs, 1, 1))
        by_head = attended.view(num_seqs, num_heads, *attended.shape[1:])  # [S, H, G, n, D]
        return by_head.permute(0, 3, 1, 2, 4).reshape(num_rows, -1, head_dim)


def flex_batch(batch: PagedBatch, flex: Flex) -> FlexAttention:
    """The decoding rows together, each chunk by itself."""
    device = batch.pool.device
    tables, context_lens = batch.block_tables.to(device), batch.context_lens.to(device)
    num_decodes, first_rows = batch.num_decodes, batch.first_rows.tolist()
    rows = [
        FlexRows(first_rows[s], first_rows[s + 1], tables[s : s + 1], context_lens[s : s + 1])
        for s in range(num_decodes, len(context_lens))
    ]
    if num_decodes:
        rows.insert(0, FlexRows(0, num_decodes, tables[:num_decodes], context_lens[:num_decodes]))
    return FlexAttention(flex, batch.cells, rows)


def flex_decodes(
    pool: torch.Tensor, block_tables: torch.Tensor, context_lens: torch.Tensor, flex: Flex
) -> FlexAttention:
    """Sequences of one token each, told on the pool's device alone; no shape depends on what the tensors
    hold. So a CUDA graph can record it.
    """
    _, num_layers, _, num_heads, block_size, _ = pool.shape
    positions = (context_lens - 1).long()
    blocks = block_tables.gather(1, (positions // block_size)[:, None])[:, 0].long()
    cells = blocks * (num_layers * 2 * num_heads * block_size) + positions % block_size
    heads = torch.arange(num_heads, device=pool.device)[:, None] * block_size
    rows = FlexRows(0, len(context_lens), block_tables, context_lens)
    return FlexAttention(flex, (heads + cells).flatten(), [rows])


def _layer_views(pool: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [1, 1, C, D]: all cells from the layer's first of each on, up to its last in the last block."""
    num_blocks, num_layers, _, num_heads, block_size, head_dim = pool.shape
    cells_of_one = num_heads * block_size  # K or V of one layer of one block
    num_cells = ((num_blocks - 1) * num_layers * 2 + 1) * cells_of_one
    flat = pool.view(1, 1, -1, head_dim)
    first = layer * 2 * cells_of_one
    return flat.narrow(2, first, num_cells), flat.narrow(2, first + cells_of_one, num_cells)


def _block_mask(pool: torch.Tensor, rows: FlexRows, window: int | None) -> BlockMask:
    num_blocks, num_layers, _, num_heads, block_size, _ = pool.shape
    stride = num_layers * 2 * num_heads  # flat blocks from one pool block to the next
    num_cells = ((num_blocks - 1) * stride + num_heads) * block_size
    tables, context_lens = rows.block_tables, rows.context_lens
    num_seqs, width = tables.shape
    num_queries = (rows.last - rows.first) // num_seqs
    first_positions = context_lens - num_queries
    blocks_of = _logical_blocks(tables, context_lens, num_blocks, block_size)
    window = num_blocks * block_size if window is None else window

    def mask_mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """The head and the sequence are what `kv_indices` walks along; uncompiled there is no such walk."""
        flat_block = kv // block_size
        logical = blocks_of[b // num_heads, flat_block // stride]
        key = logical * block_size + kv % block_size
        query = first_positions[b // num_heads] + q
        is_own = (flat_block % stride == b % num_heads) & (logical >= 0)
        return is_own & (key <= query) & (key > query - window)

    num_lists = -(-num_queries // _QUERY_BLOCK)
    ends = (torch.arange(1, num_lists + 1, device=pool.device) * _QUERY_BLOCK).clamp(max=num_queries)
    counts = (first_positions[:, None] + ends + block_size - 1) // block_size  # [S, lists]
    heads = torch.arange(num_heads, device=pool.device)[:, None]
    indices = tables[:, None, :] * stride + heads  # [S, H, W]
    return BlockMask.from_kv_blocks(
        kv_num_blocks=_laid_out(counts.int()[:, None].expand(-1, num_heads, -1), -1, 1, num_lists),
        kv_indices=_laid_out(
            indices.int()[:, :, None].expand(-1, -1, num_lists, -1), -1, 1, num_lists, width
        ),
        BLOCK_SIZE=(_QUERY_BLOCK, block_size),
        mask_mod=mask_mod,
        seq_lengths=(num_queries, num_cells),
        compute_q_blocks=False,
    )


def _laid_out(lists: torch.Tensor, *shape: int) -> torch.Tensor:
    """A copy in order: the kernel for many tokens takes lists for contiguous, not asking their strides."""
    return lists.reshape(shape).clone(memory_format=torch.contiguous_format)


def _logical_blocks(
    tables: torch.Tensor, context_lens: torch.Tensor, num_blocks: int, block_size: int
) -> torch.Tensor:
    """[S, N+1]: which of a sequence's blocks a pool block is, -1 for none; the last column means nothing."""
    num_seqs, width = tables.shape
    order = torch.arange(width, device=tables.device, dtype=torch.int32).expand(num_seqs, -1)
    is_behind = order * block_size >= context_lens[:, None]
    columns = tables.long().masked_fill(is_behind, num_blocks)
    logical = torch.full((num_seqs, num_blocks + 1), -1, dtype=torch.int32, device=tables.device)
    return logical.scatter_(1, columns, order)


def _with_sinks(result: object, sinks: torch.Tensor) -> torch.Tensor:
    """A sink takes its share of the weight afterwards: 1 / (1 + exp(sink - lse)) is left. [S·H, G, 1]."""
    attended, aux = cast("tuple[torch.Tensor, AuxOutput]", result)
    lse = cast("torch.Tensor", aux.lse)
    return attended * torch.sigmoid(lse - sinks)[..., None].to(attended.dtype)


def _softcap(cap: float) -> Callable[..., torch.Tensor]:
    def score_mod(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return cap * torch.tanh(score / cap)

    return score_mod
