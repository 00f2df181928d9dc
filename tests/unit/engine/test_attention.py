"""The paged attention against its slow twin: ragged steps over a pool whose unwritten slots hold NaN."""

from __future__ import annotations

import random

import pytest
import torch

from engine.attention import attend
from engine.attention_reference import attention_reference
from engine.attention_rules import AttentionRules
from engine.batch import BatchRow, pack
from engine.kv_pool import KVPool
from engine.layout import KVLayout

BLOCK, HEADS, GROUP, DIM, LAYERS = 4, 2, 3, 8, 2
LAYOUT = KVLayout(LAYERS, HEADS, DIM, BLOCK, "float32", "test")
PLAIN = AttentionRules(scaling=0.35)
RULES = {
    "plain": PLAIN,
    "window": AttentionRules(scaling=0.35, sliding_window=5),
    "softcap": AttentionRules(scaling=0.35, softcap=2.0),
    "sinks": AttentionRules(scaling=0.35, sinks=torch.linspace(-1, 2, HEADS * GROUP)),
}


def ragged_rows(shapes: list[tuple[int, int]], pool: KVPool, layer: int) -> list[BatchRow]:
    """(context before, new tokens) each; blocks are scattered, the context's K and V are in the pool."""
    free = list(range(pool.num_blocks))
    random.Random(0).shuffle(free)
    rows = []
    for start, num_new in shapes:
        table = [free.pop() for _ in range(LAYOUT.num_blocks_for(start + num_new))]
        for position in range(start):
            pool.tensor[table[position // BLOCK], layer, :, :, position % BLOCK] = torch.randn(2, HEADS, DIM)
        rows.append(BatchRow([0] * num_new, start, table))
    return rows


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize(
    "shapes",
    [
        [(0, 1)],
        [(7, 1), (0, 1), (3, 1), (8, 1), (4, 1)],
        [(0, BLOCK), (0, BLOCK + 1), (0, 3 * BLOCK - 1)],
        [(50, 1), (2, 1), (BLOCK, 9), (0, 5), (13, 3), (49, 1)],
        [(3, 150)],
    ],
    ids=["one token", "decodes", "cold chunks", "mixed", "several query tiles"],
)
def test_equals_the_reference(shapes, rules, layer):
    torch.manual_seed(len(shapes))
    pool = KVPool(LAYOUT, 80, torch.device("cpu"))
    pool.poison(range(80))
    rows = ragged_rows(shapes, pool, layer)
    packed = pack(rows, [True] * len(rows), pool)
    total = packed.input_ids.shape[1]
    query = torch.randn(HEADS * GROUP, total, DIM)
    key, value = torch.randn(HEADS, total, DIM), torch.randn(HEADS, total, DIM)
    out = attend(packed.paged, layer, query, key, value, rules)
    for row, last in zip(rows, packed.logit_rows.tolist(), strict=True):
        first = last + 1 - len(row.token_ids)
        expected = attention_reference(
            query[:, first : last + 1], pool.tensor, layer, row.block_table, row.start, rules
        )
        torch.testing.assert_close(out[first : last + 1], expected, rtol=1e-4, atol=1e-5)


def test_new_keys_and_values_land_in_their_slots_and_nowhere_else():
    pool = KVPool(LAYOUT, 4, torch.device("cpu"))
    pool.poison(range(4))
    row = BatchRow([0] * 6, 0, [2, 0])
    key, value = torch.randn(HEADS, 6, DIM), torch.randn(HEADS, 6, DIM)
    attend(pack([row], [True], pool).paged, 1, torch.randn(HEADS * GROUP, 6, DIM), key, value, PLAIN)
    for position in range(6):
        block = pool.tensor[[2, 0][position // BLOCK], 1]
        assert torch.equal(block[0, :, position % BLOCK], key[:, position])
        assert torch.equal(block[1, :, position % BLOCK], value[:, position])
    written = pool.tensor.isfinite()
    assert int(written.sum()) == 6 * 2 * HEADS * DIM


def test_a_block_is_one_contiguous_piece():
    pool = KVPool(LAYOUT, 3, torch.device("cpu"))
    pool.tensor.copy_(torch.randn_like(pool.tensor))
    view = pool.block_view(1)
    assert view.nbytes == pool.block_bytes == LAYOUT.block_bytes
    assert bytes(view) == pool.tensor[1].numpy().tobytes()
    view[:] = bytes(pool.block_bytes)
    assert not pool.tensor[1].any()
    assert pool.tensor[0].any()
    assert pool.tensor[2].any()
