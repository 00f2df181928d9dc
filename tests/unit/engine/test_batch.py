from __future__ import annotations

from array import array

import pytest
import torch

from engine.batch import BatchRow, pack
from engine.kv_pool import KVPool
from engine.layout import KVLayout

SIZE = 4
POOL = KVPool(KVLayout(2, 2, 8, SIZE, "float32", "any"), 32, torch.device("cpu"))
# Given in no order: two chunks, three decodes.
ROWS = [
    BatchRow([11, 12, 13], 2, [1, 2]),
    BatchRow([21], 9, [3, 4, 5]),
    BatchRow([31, 32], 0, [6, 7, 8]),
    BatchRow([41], 0, [9]),
    BatchRow([51], 8, array("i", [10, 11, 12])),
]


def test_decoding_rows_come_first_by_context_then_chunks():
    batch = pack(ROWS, [1] * 5, POOL)
    assert batch.input_ids.tolist() == [[41, 51, 21, 31, 32, 11, 12, 13]]
    assert batch.position_ids.tolist() == [[0, 8, 9, 0, 1, 2, 3, 4]]
    paged = batch.paged
    assert paged.num_decodes == 3
    assert paged.first_rows.tolist() == [0, 1, 2, 3, 5, 8]
    assert paged.context_lens.tolist() == [1, 9, 10, 2, 5]


def test_block_tables_are_padded_and_hold_what_a_context_needs():
    tables = pack(ROWS, [1] * 5, POOL).paged.block_tables
    # The chunk at position 0 has blocks for tokens that are not in this step: they are not told.
    assert tables.tolist() == [[9, 0, 0], [10, 11, 12], [3, 4, 5], [6, 0, 0], [1, 2, 0]]


def test_what_a_kernel_reads_is_int32_and_contiguous():
    paged = pack(ROWS, [1] * 5, POOL).paged
    for tensor in (paged.first_rows, paged.context_lens, paged.block_tables):
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()


@pytest.mark.parametrize(
    ("num_logits", "expected"),
    [
        ([True] * 5, [7, 2, 4, 0, 1]),
        ([False, True, False, False, True], [2, 1]),
        ([3, 1, 2, 0, 1], [5, 6, 7, 2, 3, 4, 1]),
        ([0] * 5, []),
    ],
)
def test_logits_are_of_the_last_tokens_in_the_order_of_the_rows_given(num_logits, expected):
    assert pack(ROWS, num_logits, POOL).logit_rows.tolist() == expected


def test_cells_are_where_each_new_token_lies():
    cells = pack(ROWS, [1] * 5, POOL).paged.cells.view(2, -1)
    per_block, per_head = 2 * 2 * 2 * SIZE, SIZE
    lies_in = [(9, 0), (12, 0), (5, 1), (6, 0), (6, 1), (1, 2), (1, 3), (2, 0)]
    first_head = [block * per_block + slot for block, slot in lies_in]
    assert cells.tolist() == [first_head, [cell + per_head for cell in first_head]]


def test_decodes_share_a_group_unless_one_is_far_longer():
    lengths = [1, 2, 6, 7, 40, 41]
    rows = [BatchRow([0], n - 1, list(range(-(-n // SIZE)))) for n in lengths]
    groups = pack(rows, [1] * 6, POOL).paged.decodes
    assert [(group.first, group.last) for group in groups] == [(0, 3), (3, 4), (4, 6)]


def test_padding_of_a_group_reads_a_full_block():
    rows = [BatchRow([0], 1, [5]), BatchRow([0], 7, [8, 9])]
    (group,) = pack(rows, [1] * 2, POOL).paged.decodes
    blocks = group.block_rows // (2 * 2 * 2)
    assert blocks.tolist() == [[[5, 8]] * 2, [[8, 9]] * 2]
