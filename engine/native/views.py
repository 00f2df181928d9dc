"""A step's pool and rows as the kernels see them: addresses, good while the tensors live."""

from __future__ import annotations

import torch

from engine.batch import PagedBatch
from engine.native.library import PagedRows, PoolView


def view_pool(pool: torch.Tensor) -> PoolView:
    _, num_layers, _, num_kv_heads, block_size, head_dim = pool.shape
    return PoolView(pool.data_ptr(), num_layers, num_kv_heads, block_size, head_dim)


def view_rows(paged: PagedBatch) -> PagedRows:
    return PagedRows(
        num_seqs=len(paged.context_lens),
        first_row=paged.first_rows.data_ptr(),
        context_len=paged.context_lens.data_ptr(),
        block_tables=paged.block_tables.data_ptr(),
        table_width=paged.block_tables.shape[1],
    )
