"""One step's rows and where their K and V lie: what the paged attention is told.

All tokens of a step are packed into one row of length T: first the decoding sequences (one token each,
by context length), then the chunks. The tensors here are made once for each step and used by every layer.
No cost here grows with a context: a block table is copied as it lies in memory.

The torch path sees a pool of shape `[N, L, 2, H, B, D]` in two flat ways. As cells of one token,
`[N·L·2·H·B, D]`: that is where new K and V are written. As rows of one block, `[N·L·2·H, B·D]`: one is read
for each block, K or V, and head. Both indices are linear in the layer, so one addition moves them to another
layer. What that path alone needs is made when it first asks.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.kv_pool import KVPool

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

# Two contexts share a padded group only if the longer one is at most this much longer.
_MAX_PADDING_RATIO = 2


class BatchRow(NamedTuple):
    """`token_ids` are those at positions `[start, start + len(token_ids))`; `block_table` covers them (an
    `array("i")` costs least).
    """

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


@dataclass(frozen=True)
class PagedBatch:
    """S sequences. Those of one token come first, by context length; `num_decodes` counts them.

    Sequence s has the step's rows `[first_rows[s], first_rows[s + 1])`: its tokens at the positions that end
    at `context_lens[s]`. Its first `ceil(context_lens[s] / B)` entries of `block_tables[s]` are its blocks;
    the rest is padding, not to be read. These three are int32 and on the CPU, wherever the pool is.
    """

    pool: torch.Tensor  # [N, L, 2, H, B, D]
    num_decodes: int
    first_rows: torch.Tensor  # [S+1]
    context_lens: torch.Tensor  # [S], new tokens included
    block_tables: torch.Tensor  # [S, W]

    @property
    def block_size(self) -> int:
        return self.pool.shape[4]

    @cached_property
    def cells(self) -> torch.Tensor:
        """[H·T]: K cells of layer 0, heads outermost."""
        _, num_layers, _, num_heads, size, _ = self.pool.shape
        first_rows: Int64s = self.first_rows.numpy().astype(np.int64)
        num_tokens = np.diff(first_rows)
        positions = _positions(first_rows, self.context_lens.numpy() - num_tokens)
        sequences = np.repeat(np.arange(len(num_tokens)), num_tokens)
        blocks = self.block_tables.numpy()[sequences, positions // size].astype(np.int64)
        cells = blocks * (num_layers * 2 * num_heads * size) + positions % size
        heads = np.arange(num_heads)[:, None] * size
        return torch.from_numpy((heads + cells).reshape(-1)).to(self.pool.device)

    @cached_property
    def decodes(self) -> tuple[DecodeGroup, ...]:
        """A group is a range, and its last row is its longest."""
        context_lens = self.context_lens.numpy()[: self.num_decodes]
        groups: list[DecodeGroup] = []
        first = 0
        while first < self.num_decodes:
            longest = _MAX_PADDING_RATIO * context_lens[first] + self.block_size
            last = int(np.searchsorted(context_lens, longest, side="right"))
            groups.append(self._decode_group(first, last))
            first = last
        return tuple(groups)

    @cached_property
    def prefills(self) -> tuple[PrefillRows, ...]:
        first_rows, context_lens = self.first_rows.tolist(), self.context_lens.tolist()
        return tuple(
            PrefillRows(
                first_rows[s],
                first_rows[s + 1],
                context_lens[s],
                self._block_rows(self.block_tables[s, : -(-context_lens[s] // self.block_size)].long()),
            )
            for s in range(self.num_decodes, len(context_lens))
        )

    def _decode_group(self, first: int, last: int) -> DecodeGroup:
        device, size = self.pool.device, self.block_size
        context_lens = self.context_lens[first:last].long()
        num_blocks = (context_lens + size - 1) // size
        width = int(num_blocks[-1])
        tables = self.block_tables[first:last, :width].long()
        # Where anything is padded, the longest row has more than one block, so its first block is full:
        # padding reads written numbers, which a mask can cancel, where NaN would spoil the sum.
        tables = torch.where(torch.arange(width) < num_blocks[:, None], tables, tables[-1, 0])
        columns = torch.arange(width * size)
        padding = columns >= context_lens[:, None]
        is_unwritten = padding & (columns < (num_blocks * size)[:, None])
        num_heads = self.pool.shape[3]
        unwritten = is_unwritten[:, None, :].expand(-1, num_heads, -1).flatten().nonzero().flatten()
        return DecodeGroup(
            first=first,
            last=last,
            block_rows=self._block_rows(tables),
            context_lens=context_lens.to(device),
            padding=padding[:, None, None, :].to(device),
            unwritten=unwritten.to(device),
        )

    def _block_rows(self, tables: torch.Tensor) -> torch.Tensor:
        """[..., W] block ids → [..., H, W] rows."""
        _, num_layers, _, num_heads, _, _ = self.pool.shape
        heads = torch.arange(num_heads)[:, None]
        return (tables[..., None, :] * (num_layers * 2 * num_heads) + heads).to(self.pool.device)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The model's input, and which rows to take logits of."""

    input_ids: torch.Tensor  # [1, T]
    position_ids: torch.Tensor  # [1, T]
    logit_rows: torch.Tensor  # [R], in the order of the rows given
    paged: PagedBatch


def pack(rows: Sequence[BatchRow], num_logits: Sequence[int], pool: KVPool) -> PackedBatch:
    """Logits are those of the last `num_logits[i]` tokens of rows[i], in order."""
    num_tokens = np.array([len(row.token_ids) for row in rows])
    starts = np.array([row.start for row in rows])
    order = np.lexsort((starts + num_tokens, num_tokens > 1))
    packed = [rows[i] for i in order.tolist()]
    first_rows = np.concatenate(([0], num_tokens[order].cumsum()))
    device = pool.tensor.device
    input_ids = array("q", chain.from_iterable([row.token_ids for row in packed]))
    ends = np.empty_like(order)
    ends[order] = first_rows[1:]
    context_lens = (starts + num_tokens)[order]
    num_blocks = -(-context_lens // pool.layout.block_size)
    return PackedBatch(
        input_ids=torch.from_numpy(np.frombuffer(input_ids, np.int64)).to(device)[None],
        position_ids=torch.from_numpy(_positions(first_rows, starts[order])).to(device)[None],
        logit_rows=torch.from_numpy(_last_rows(ends, np.array(num_logits, np.int64))).to(device),
        paged=PagedBatch(
            pool=pool.tensor,
            num_decodes=int((num_tokens == 1).sum()),
            first_rows=torch.from_numpy(first_rows.astype(np.int32)),
            context_lens=torch.from_numpy(context_lens.astype(np.int32)),
            block_tables=torch.from_numpy(_block_tables(packed, num_blocks)),
        ),
    )


def _positions(first_rows: Int64s, starts: Int64s) -> Int64s:
    """[T]: positions of the packed tokens, where sequence s has rows from `first_rows[s]` [S+1] on, the first
    of them at position `starts[s]`.
    """
    return np.arange(first_rows[-1], dtype=np.int64) + np.repeat(
        starts - first_rows[:-1], np.diff(first_rows)
    )


def _last_rows(ends: Int64s, counts: Int64s) -> Int64s:
    """The `counts[i]` rows before `ends[i]`, for every i."""
    before = counts.cumsum() - counts
    return np.arange(counts.sum(), dtype=np.int64) + np.repeat(ends - counts - before, counts)


def _block_tables(rows: Sequence[BatchRow], num_blocks: Int64s) -> Int32s:
    """[S, W]: the first `num_blocks[s]` blocks of each row, padded with zeros."""
    tables = [
        row.block_table if isinstance(row.block_table, array) else array("i", row.block_table) for row in rows
    ]
    if any(len(table) != num for table, num in zip(tables, num_blocks.tolist(), strict=True)):
        tables = [table[:num] for table, num in zip(tables, num_blocks.tolist(), strict=True)]
    padded = np.zeros((len(tables), num_blocks.max(initial=0)), np.int32)
    padded[np.arange(padded.shape[1]) < num_blocks[:, None]] = np.frombuffer(b"".join(tables), np.int32)
    return padded
