"""FlexAttention on the pool against the slow twin. Uncompiled it scores every cell of the pool and masks, so
there the mask alone must be right; compiled it walks along the lists of blocks, as on a GPU.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from engine.attention import attend
from engine.attention_kernel import AttentionKernel
from engine.attention_reference import attention_reference
from engine.attention_rules import AttentionRules
from engine.batch import BatchRow, PackedBatch, PagedBatch, pack
from engine.cuda_graphs import clear_begun
from engine.flex_attention import compiled_flex, flex_batch, flex_decodes, why_no_flex
from engine.kv_pool import KVPool
from engine.layout import KVLayout

BLOCK, HEADS, GROUP, DIM, LAYERS, BLOCKS = 16, 2, 3, 16, 2, 24
LAYOUT = KVLayout(LAYERS, HEADS, DIM, BLOCK, "float32", "test")
CPU = torch.device("cpu")
RULES = {
    "plain": AttentionRules(scaling=0.35),
    "window": AttentionRules(scaling=0.35, sliding_window=5),
    "softcap": AttentionRules(scaling=0.35, softcap=2.0),
    "sinks": AttentionRules(scaling=0.35, sinks=torch.linspace(-1, 2, HEADS * GROUP)),
}
DECODES = [(7, 1), (40, 1), (3, 1), (15, 1), (16, 1)]
CHUNKS = [(0, 16), (16, 9), (0, 5), (13, 3)]
LONG = [(3, 150)]  # two lists of blocks

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
MakeKernel = Callable[[PagedBatch], AttentionKernel]


def step(
    shapes: list[tuple[int, int]], layer: int, *, elsewhere: float, device: torch.device = CPU
) -> tuple[list[BatchRow], PackedBatch]:
    """(context before, new tokens) each; all that no sequence wrote holds `elsewhere`."""
    pool = KVPool(LAYOUT, BLOCKS, device)
    pool.tensor.fill_(elsewhere)
    free = list(range(BLOCKS))
    random.Random(0).shuffle(free)
    rows = []
    for start, num_new in shapes:
        table = [free.pop() for _ in range(LAYOUT.num_blocks_for(start + num_new))]
        if start % BLOCK:
            pool.tensor[table[start // BLOCK]] = 0
        for position in range(start):
            cell = torch.randn(2, HEADS, DIM, device=device)
            pool.tensor[table[position // BLOCK], layer, :, :, position % BLOCK] = cell
        rows.append(BatchRow([0] * num_new, start, table))
    return rows, pack(rows, [1] * len(rows), pool)


def check(
    rows: list[BatchRow],
    packed: PackedBatch,
    layer: int,
    rules: AttentionRules,
    make: MakeKernel,
    group: int = GROUP,
) -> None:
    total, device = packed.input_ids.shape[1], packed.paged.pool.device
    query = torch.randn(HEADS * group, total, DIM, device=device)
    key, value = torch.randn(2, HEADS, total, DIM, device=device)
    out = attend(packed.paged, layer, query, key, value, rules, make(packed.paged))
    for row, last in zip(rows, packed.logit_rows.tolist(), strict=True):
        first = last + 1 - len(row.token_ids)
        own, pool = query[:, first : last + 1].cpu(), packed.paged.pool.cpu()
        expected = attention_reference(own, pool, layer, row.block_table, row.start, rules)
        torch.testing.assert_close(out[first : last + 1].cpu(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("shapes", [DECODES + CHUNKS, LONG], ids=["mixed", "long"])
def test_equals_the_reference_by_its_mask(shapes, rules, layer):
    rows, packed = step(shapes, layer, elsewhere=50.0)
    check(rows, packed, layer, rules, lambda paged: flex_batch(paged, flex_attention))


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES.keys())
def test_decodes_told_on_the_device_alone_give_the_same(rules):
    rows, packed = step(DECODES, 1, elsewhere=50.0)
    # As a graph's tables are: wider than any context, with what an older step left there.
    tables = torch.nn.functional.pad(packed.paged.block_tables, (0, 3), value=BLOCKS - 1)

    def make(paged: PagedBatch) -> AttentionKernel:
        return flex_decodes(paged.pool, tables, paged.context_lens, flex_attention)

    check(rows, packed, 1, rules, make)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["plain", "window", "softcap"])
def test_compiled_it_reads_the_blocks_of_its_lists_and_no_others(name):
    """On a CPU it takes no sinks, and wants lists as long as the pool."""
    flex = compiled_flex()
    for layer in range(LAYERS):
        rows, packed = step(CHUNKS + LONG, layer, elsewhere=float("nan"))
        clear_begun(packed.paged)
        tables = packed.paged.block_tables
        width = BLOCKS * LAYERS * 2 * HEADS
        wide = torch.nn.functional.pad(tables, (0, width - tables.shape[1]))
        packed = replace(packed, paged=replace(packed.paged, block_tables=wide))
        check(rows, packed, layer, RULES[name], lambda paged: flex_batch(paged, flex))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("group", [3, 4])  # 4, as every power of two, has a kernel of its own for few tokens
@pytest.mark.parametrize("name", RULES)
def test_on_a_gpu_its_kernels_give_what_the_reference_gives(name, group):
    flex, rules = compiled_flex(), RULES[name]
    if rules.sinks is not None:
        rules = replace(rules, sinks=torch.linspace(-1, 2, HEADS * group, device="cuda"))
    for layer in range(LAYERS):
        for shapes in (DECODES + CHUNKS, LONG, [(40, 1)]):
            rows, packed = step(shapes, layer, elsewhere=float("nan"), device=torch.device("cuda"))
            clear_begun(packed.paged)
            check(rows, packed, layer, rules, lambda paged: flex_batch(paged, flex), group)


@pytest.mark.parametrize(
    "shapes", [[(40, 1)], [(0, 16)], LONG, DECODES], ids=["one", "chunk", "long", "many"]
)
def test_its_lists_lie_in_order_as_the_kernels_take_for_granted(shapes):
    _, packed = step(shapes, 0, elsewhere=0.0)
    for rows in flex_batch(packed.paged, flex_attention).rows:
        mask = rows.mask(packed.paged.pool, None)
        for lists in (mask.kv_num_blocks, mask.kv_indices):
            assert lists.stride() == torch.empty(lists.shape).stride()


def test_engines_of_one_process_compile_one_after_the_other(monkeypatch):
    inside, overlaps = threading.Lock(), []

    def compiled(number: int) -> int:
        overlaps.append(not inside.acquire(blocking=False))
        threading.Event().wait(0.01)
        inside.release()
        return number

    monkeypatch.setattr(torch, "compile", lambda *_, **__: compiled)
    with ThreadPoolExecutor(4) as threads:
        answers = [threads.submit(compiled_flex(), number) for number in range(8)]
        assert [answer.result(10) for answer in answers] == list(range(8))
    assert overlaps == [False] * 8


def test_it_says_which_pools_it_cannot_read():
    def pool(block_size: int, head_dim: int, num_blocks: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_blocks, 32, 2, 8, block_size, head_dim, dtype=dtype, device="meta")

    assert why_no_flex(pool(16, 128, 2048, torch.bfloat16)) is None
    assert "larger than 4 GiB" in str(why_no_flex(pool(16, 128, 2049, torch.bfloat16)))
    assert "larger than 8 GiB" in str(why_no_flex(pool(16, 128, 2049, torch.float32)))
    assert "block_size is 24" in str(why_no_flex(pool(24, 128, 8, torch.bfloat16)))
    assert "block_size is 8" in str(why_no_flex(pool(8, 128, 8, torch.bfloat16)))
    assert "are of 8" in str(why_no_flex(pool(16, 8, 8, torch.bfloat16)))
