"""The kernels' attention beside the slow one, and bit for bit beside itself in other batches."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch

from engine.attention_reference import attention_reference
from engine.attention_rules import AttentionRules
from engine.batch import BatchRow, PagedBatch, pack
from engine.errors import NativeUnavailable
from engine.kv_pool import KVPool
from engine.layout import DTYPES, KVLayout
from engine.native.attention import NativeAttention
from engine.native.library import NativeLibrary
from tests.unit.engine.native.kernels import library_or_skip

LAYERS, LAYER = 2, 1
DTYPE_NAMES = ["float32", "bfloat16"]
# Of what the values, about 1, are mixed to: bf16 has 8 bits, and the weights are rounded to it too.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1.2e-2}
SCALING = 0.17
RULES = {
    "plain": AttentionRules(SCALING),
    "window shorter than a block": AttentionRules(SCALING, sliding_window=3),
    "window": AttentionRules(SCALING, sliding_window=70),
    "softcap": AttentionRules(SCALING, softcap=1.5),
    "everything": AttentionRules(SCALING, sliding_window=41, softcap=2.0, sinks=torch.linspace(-1, 3, 6)),
}
# (tokens computed before, new tokens), with contexts around borders of blocks, of 64 keys and of 512.
DECODES = [(0, 1), (7, 1), (30, 1), (62, 1), (63, 1), (64, 1), (127, 1), (511, 1), (512, 1), (530, 1)]
SPECULATED = [(3, 2), (60, 5), (509, 5), (0, 16), (515, 16)]
CHUNKS = [(0, 33), (40, 33), (0, 150), (490, 150)]


@dataclass(frozen=True)
class Case:
    """Sequences whose earlier K and V are in the pool; what was never written there is NaN."""

    pool: KVPool
    rows: Sequence[BatchRow]
    query: torch.Tensor  # [Hq, T, D], like key and value a view of rows that hold more
    key: torch.Tensor  # [H, T, D]
    value: torch.Tensor

    @property
    def batch(self) -> PagedBatch:
        return pack(self.rows, [1] * len(self.rows), self.pool).paged

    def attend(self, attention: NativeAttention, rules: AttentionRules) -> torch.Tensor:
        return attention.attend(self.batch, LAYER, self.query, self.key, self.value, rules)

    def alone(self, row: int, first: int, last: int) -> Case:
        """Tokens [first, last) of one sequence as if they were its newest."""
        before = sum(len(each.token_ids) for each in self.rows[:row])
        whole = self.rows[row]
        part = BatchRow([0] * (last - first), whole.start + first, whole.block_table)
        tokens = slice(before + first, before + last)
        return Case(self.pool, [part], self.query[:, tokens], self.key[:, tokens], self.value[:, tokens])


def make_case(
    shapes: Sequence[tuple[int, int]],
    dtype: str,
    *,
    num_heads: int = 2,
    group: int = 3,
    head_dim: int = 32,
    block_size: int = 16,
) -> Case:
    shapes = sorted(shapes, key=lambda shape: (shape[1] > 1, sum(shape)))  # as a step has them
    layout = KVLayout(LAYERS, num_heads, head_dim, block_size, dtype, "test")
    counts = [layout.num_blocks_for(start + new) for start, new in shapes]
    pool = KVPool(layout, sum(counts) + 2, torch.device("cpu"))
    pool.poison(range(pool.num_blocks))
    free = list(range(pool.num_blocks))
    random.Random(0).shuffle(free)
    rows = []
    for (start, new), count in zip(shapes, counts, strict=True):
        table = [free.pop() for _ in range(count)]
        for index, block in enumerate(table):
            written = min(block_size, start - index * block_size)
            if written > 0:
                content = torch.randn(2, num_heads, written, head_dim)
                pool.tensor[block, LAYER, :, :, :written] = content.to(pool.tensor.dtype)
        rows.append(BatchRow([0] * new, start, table))
    total = sum(new for _, new in shapes)
    joined = torch.randn(total, (num_heads * (group + 2)) * head_dim + 16).to(DTYPES[dtype])
    parts = joined[:, :-16].view(total, -1, head_dim).transpose(0, 1)
    num_queries = num_heads * group
    return Case(pool, rows, parts[:num_queries], parts[num_queries:-num_heads], parts[-num_heads:])


@pytest.fixture(autouse=True)
def same_numbers() -> Iterator[None]:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=DTYPE_NAMES)
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def attention(dtype: str) -> NativeAttention:
    library: NativeLibrary = library_or_skip()
    try:
        library.check_dtype(DTYPES[dtype])
    except NativeUnavailable as error:
        pytest.skip(str(error))
    return NativeAttention(library)


def expected_rows(case: Case, rules: AttentionRules, row: int, token: int, at: int) -> torch.Tensor:
    """What the slow one gives for one token; its K and V are in the pool."""
    whole = case.rows[row]
    return attention_reference(
        case.query[:, at : at + 1], case.pool.tensor, LAYER, whole.block_table, whole.start + token, rules
    )[0]


def check_some(case: Case, attention: NativeAttention, rules: AttentionRules, tolerance: float) -> None:
    """All tokens of short rows; of long ones the first, the last and some between."""
    out = case.attend(attention, rules)
    first = 0
    for index, row in enumerate(case.rows):
        num = len(row.token_ids)
        for token in sorted({0, 1, num // 3, num // 2, num - 2, num - 1} & set(range(num))):
            expected = expected_rows(case, rules, index, token, first + token)
            error = (out[first + token].float() - expected).abs().max()
            assert error < tolerance, (row.start, num, token)
        first += num
    assert first == len(out)


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES.keys())
def test_decodes_speculated_tokens_and_chunks_of_one_step_equal_the_reference(attention, dtype, rules):
    case = make_case([*DECODES, *SPECULATED, *CHUNKS], dtype)
    check_some(case, attention, rules, TOLERANCE[dtype])


@pytest.mark.parametrize("group", range(1, 10))
def test_any_number_of_query_heads_shares_a_kv_head(attention, dtype, group):
    shapes = [(0, 1), (70, 1), (9, 2), (64, 5), (3, 16), (20, 33)]
    rules = AttentionRules(SCALING, sinks=torch.linspace(-2, 2, 2 * group))
    check_some(make_case(shapes, dtype, group=group), attention, rules, TOLERANCE[dtype])


@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("block_size", [4, 16, 24, 32, 128])
def test_any_head_size_and_block_size(attention, dtype, head_dim, block_size):
    shapes = [(0, 1), (70, 1), (130, 1), (9, 3), (63, 12), (20, 33)]
    case = make_case(shapes, dtype, group=2, head_dim=head_dim, block_size=block_size)
    for rules in (RULES["plain"], RULES["window shorter than a block"]):
        check_some(case, attention, rules, TOLERANCE[dtype])


def test_many_kv_heads_with_a_query_head_each(attention, dtype):
    case = make_case([(100, 1), (5, 1), (64, 2), (30, 4)], dtype, num_heads=33, group=1)
    check_some(case, attention, RULES["plain"], TOLERANCE[dtype])


def test_large_scores_do_not_overflow_and_equal_ones_share_the_weight(attention, dtype):
    case = make_case([(90, 1), (10, 60)], dtype)
    case.query.mul_(300)
    out = case.attend(attention, RULES["plain"])
    assert out.isfinite().all()
    case.query.zero_()
    out = case.attend(attention, RULES["plain"])
    values = torch.cat([case.pool.tensor[b, LAYER, 1, 0] for b in case.rows[0].block_table])[:91].float()
    torch.testing.assert_close(out[0, 0].float(), values.mean(0), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("block_size", [4, 16])
def test_a_tokens_bits_are_the_same_alone_speculated_in_a_chunk_and_on_more_threads(
    attention, dtype, rules, block_size
):
    case = make_case([*DECODES, *SPECULATED, *CHUNKS], dtype, block_size=block_size)
    whole = case.attend(attention, rules)
    torch.set_num_threads(2)
    assert torch.equal(case.attend(attention, rules), whole)
    first = 0
    for index, row in enumerate(case.rows):
        num = len(row.token_ids)
        for begin, end in ((0, 1), (num - 1, num), (0, 3), (num // 2, num // 2 + 4), (1, num)):
            if 0 <= begin < end <= num:
                part = case.alone(index, begin, end).attend(attention, rules)
                assert torch.equal(part, whole[first + begin : first + end]), (row.start, num, begin, end)
        first += num


def test_one_long_context_is_split_over_threads_without_another_bit(attention, dtype):
    case = make_case([(2100, 1)], dtype, num_heads=1)
    whole = case.attend(attention, RULES["everything"]), case.attend(attention, RULES["plain"])
    for num_threads in (2, 3, 8):
        torch.set_num_threads(num_threads)
        assert torch.equal(case.attend(attention, RULES["everything"]), whole[0])
        assert torch.equal(case.attend(attention, RULES["plain"]), whole[1])


def test_new_keys_and_values_land_in_their_slots_and_nowhere_else(attention, dtype):
    case = make_case([(6, 1), (3, 30)], dtype, block_size=4)
    before = case.pool.tensor.clone()
    case.attend(attention, RULES["plain"])
    at = 0
    for row in case.rows:
        for position in range(row.start, row.end):
            block, slot = row.block_table[position // 4], position % 4
            before[block, LAYER, 0, :, slot] = case.key[:, at]
            before[block, LAYER, 1, :, slot] = case.value[:, at]
            at += 1
    torch.testing.assert_close(case.pool.tensor, before, rtol=0, atol=0, equal_nan=True)


def test_what_the_kernels_do_not_compute_is_left_to_torch(attention, dtype):
    pool = torch.zeros(1, dtype=DTYPES[dtype])
    query = torch.zeros(2, 1, 64, dtype=DTYPES[dtype])
    assert attention.can_attend(query, pool, RULES["everything"])
    assert not attention.can_attend(query[..., :24], pool, RULES["plain"])
    assert not attention.can_attend(query.expand(2, 1, 64).repeat(1, 1, 5), pool, RULES["plain"])
    assert not attention.can_attend(query.double(), pool, RULES["plain"])
    assert not attention.can_attend(query, pool, AttentionRules(-1.0))
