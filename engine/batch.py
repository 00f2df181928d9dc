"""One step's rows and where their K and V lie: what the paged attention is told.

All tokens of a step are packed into one row of length T: first the decoding sequences (one token each,
by context length), then the chunks. The tensors here are made once for each step and used by every layer.

A pool of shape `[N, L, 2, H, B, D]` is seen in two flat ways. As cells of one token, `[N·L·2·H·B, D]`:
that is where new K and V are written. As rows of one block, `[N·L·2·H, B·D]`: one is read for each block,
K or V, and head. Both indices are linear in the layer, so one addition moves them to another layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.kv_pool import KVPool

# Two contexts share a padded group only if the longer one is at most this much longer.
_MAX_PADDING_RATIO = 2


@dataclass(frozen=True, slots=True)
class BatchRow:
    """`token_ids` are those at positions `[start, start + len(token_ids))`; `block_table` covers them."""

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows `[first, last)` of the step: S sequences with one token each, padded to W blocks."""

    first: int
    last: int
    block_rows: torch.Tensor  # [S, H, W]: K rows of layer 0
    context_lens: torch.Tensor  # [S], the new token included
    padding: torch.Tensor  # [S, 1, 1, W·B]: True where there is no token
    # Cells of the gathered V (seen as [S·H·W·B, D]) that were never written, those of last blocks.
    unwritten: torch.Tensor


@dataclass(frozen=True, slots=True)
class PrefillRows:
    """Rows `[first, last)` of the step: one sequence's chunk, which ends at position `context_len`."""

    first: int
    last: int
    context_len: int
    block_rows: torch.Tensor  # [H, W]: K rows of layer 0


@dataclass(frozen=True, slots=True)
class PagedBatch:
    pool: torch.Tensor  # [N, L, 2, H, B, D]
    cells: torch.Tensor  # [H·T]: K cells of layer 0, heads outermost
    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillRows, ...]

    @property
    def block_size(self) -> int:
        return self.pool.shape[4]


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The model's input, and which rows to take logits of."""

    input_ids: torch.Tensor  # [1, T]
    position_ids: torch.Tensor  # [1, T]
    logit_rows: torch.Tensor  # [R], in the order of the rows given
    paged: PagedBatch


def pack(rows: Sequence[BatchRow], wants_logits: Sequence[bool], pool: KVPool) -> PackedBatch:
    """Logits are those of the last token of each row that wants them."""
    order = sorted(range(len(rows)), key=lambda i: (len(rows[i].token_ids) > 1, rows[i].end))
    packed = [rows[i] for i in order]
    last_rows = [0] * len(rows)
    total = 0
    for i in order:
        total += len(rows[i].token_ids)
        last_rows[i] = total - 1
    device = pool.tensor.device
    num_decodes = sum(len(row.token_ids) == 1 for row in rows)
    return PackedBatch(
        input_ids=torch.tensor([[t for row in packed for t in row.token_ids]], device=device),
        position_ids=torch.tensor([[p for row in packed for p in range(row.start, row.end)]], device=device),
        logit_rows=torch.tensor(
            [r for r, is_wanted in zip(last_rows, wants_logits, strict=True) if is_wanted],
            dtype=torch.long,
            device=device,
        ),
        paged=PagedBatch(
            pool=pool.tensor,
            cells=_cells(packed, pool),
            decodes=_decode_groups(packed[:num_decodes], pool),
            prefills=_prefill_rows(packed[num_decodes:], num_decodes, pool),
        ),
    )


def _cells(rows: Sequence[BatchRow], pool: KVPool) -> torch.Tensor:
    layout = pool.layout
    size = layout.block_size
    cells = torch.tensor(
        [
            row.block_table[p // size] * (layout.num_layers * 2 * layout.num_kv_heads * size) + p % size
            for row in rows
            for p in range(row.start, row.end)
        ]
    )
    heads = torch.arange(layout.num_kv_heads)[:, None] * size
    return (heads + cells).flatten().to(pool.tensor.device)


def _block_rows(tables: torch.Tensor, pool: KVPool) -> torch.Tensor:
    """[..., W] block ids → [..., H, W] rows."""
    layout = pool.layout
    heads = torch.arange(layout.num_kv_heads)[:, None]
    return tables[..., None, :] * (layout.num_layers * 2 * layout.num_kv_heads) + heads


def _prefill_rows(rows: Sequence[BatchRow], first: int, pool: KVPool) -> tuple[PrefillRows, ...]:
    prefills: list[PrefillRows] = []
    for row in rows:
        last = first + len(row.token_ids)
        table = torch.tensor(row.block_table[: pool.layout.num_blocks_for(row.end)])
        block_rows = _block_rows(table, pool).to(pool.tensor.device)
        prefills.append(PrefillRows(first, last, row.end, block_rows))
        first = last
    return tuple(prefills)


def _decode_groups(rows: Sequence[BatchRow], pool: KVPool) -> tuple[DecodeGroup, ...]:
    """`rows` come by context length, so a group is a range and its last row is its longest."""
    groups: list[DecodeGroup] = []
    first = 0
    for index in range(1, len(rows) + 1):
        if (
            index == len(rows)
            or rows[index].end > _MAX_PADDING_RATIO * rows[first].end + pool.layout.block_size
        ):
            groups.append(_decode_group(rows[first:index], first, pool))
            first = index
    return tuple(groups)


def _decode_group(rows: Sequence[BatchRow], first: int, pool: KVPool) -> DecodeGroup:
    layout = pool.layout
    device = pool.tensor.device
    width = layout.num_blocks_for(rows[-1].end)
    # Where anything is padded, the longest row has more than one block, so its first block is full:
    # padding reads written numbers, which a mask can cancel, where NaN would spoil the sum.
    filler = rows[-1].block_table[0]
    tables = torch.full((len(rows), width), filler)
    for i, row in enumerate(rows):
        num_blocks = layout.num_blocks_for(row.end)
        tables[i, :num_blocks] = torch.tensor(row.block_table[:num_blocks])
    context_lens = torch.tensor([row.end for row in rows])
    columns = torch.arange(width * layout.block_size)
    padding = columns >= context_lens[:, None]
    last_block_end = (context_lens + layout.block_size - 1) // layout.block_size * layout.block_size
    is_unwritten = padding & (columns < last_block_end[:, None])
    unwritten = is_unwritten[:, None, :].expand(-1, layout.num_kv_heads, -1).flatten().nonzero().flatten()
    return DecodeGroup(
        first=first,
        last=first + len(rows),
        block_rows=_block_rows(tables, pool).to(device),
        context_lens=context_lens.to(device),
        padding=padding[:, None, None, :].to(device),
        unwritten=unwritten.to(device),
    )
