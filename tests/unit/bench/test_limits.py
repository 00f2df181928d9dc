"""What a row asks of a machine, worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import ModelConfig
from engine.loading import load_model
from pdserve.bench.limits import read_shape, row_work
from pdserve.bench.rows import ROWS, Phase, Plan, Row, parse_rows
from pdserve.bench.work import (
    ModelShape,
    Rates,
    Work,
    decode_work,
    is_memory_bound,
    limit_s,
    prefill_work,
)
from tests.models import tiny_model

# Ten weights in the layers, four in the head; a cell of K and V is 2·1·3·2 bytes.
SHAPE = ModelShape(
    num_layer_weights=10,
    num_head_weights=4,
    num_query_heads=2,
    num_kv_heads=1,
    head_dim=3,
    windows=(None, None),
    itemsize=2,
)
PLAN = Plan(num_rounds=3, num_steps=10, num_warm_steps=4, max_refilled_tokens=100)


@pytest.mark.parametrize(
    ("num_tokens", "windows", "pairs", "cells"),
    [
        (1, (None,), 1, 1),
        (4, (None,), 1 + 2 + 3 + 4, 4),
        (4, (None, None), 2 * (1 + 2 + 3 + 4), 8),
        (5, (3,), 1 + 2 + 3 + 3 + 3, 5),
        (5, (None, 3), (1 + 2 + 3 + 4 + 5) + (1 + 2 + 3 + 3 + 3), 10),
        (2, (3,), 1 + 2, 2),
    ],
)
def test_a_prefill_is_all_its_tokens_and_the_logits_of_one(
    num_tokens: int, windows: tuple[int | None, ...], pairs: int, cells: int
) -> None:
    work = prefill_work(replace(SHAPE, windows=windows), num_tokens)
    assert work.operations == 2 * (10 * num_tokens + 4) + 4 * pairs * 2 * 3
    assert work.num_bytes == 2 * (10 + 4) + cells * 12


def test_what_is_cached_of_a_prompt_is_read_and_not_computed() -> None:
    whole, rest = prefill_work(SHAPE, 7), prefill_work(SHAPE, 7, 4)
    first = prefill_work(SHAPE, 4)
    assert rest.operations == whole.operations - first.operations + 2 * 4
    assert rest.num_bytes == whole.num_bytes


@pytest.mark.parametrize(
    ("batch", "context", "windows", "attended"),
    [
        (1, 1, (None,), 1),
        (1, 7, (None,), 7),
        (8, 7, (None, None), 8 * 14),
        (8, 7, (None, 4), 8 * (7 + 4)),
        (2, 7.5, (None,), 15),
    ],
)
def test_a_step_reads_each_weight_once_and_each_k_and_v_once(
    batch: int, context: float, windows: tuple[int | None, ...], attended: float
) -> None:
    work = decode_work(replace(SHAPE, windows=windows), batch, context)
    assert work.operations == 2 * batch * (10 + 4) + 4 * attended * 2 * 3
    assert work.num_bytes == 2 * (10 + 4) + attended * 12


@pytest.mark.parametrize(
    ("work", "seconds", "is_memory"),
    [(Work(100, 10), 10.0, False), (Work(10, 100), 20.0, True), (Work(50, 25), 5.0, False)],
)
def test_the_limit_is_the_slower_of_arithmetic_and_memory(
    work: Work, seconds: float, is_memory: bool
) -> None:
    rates = Rates(operations=10, num_bytes=5)
    assert limit_s(work, rates) == seconds
    assert is_memory_bound(work, rates) is is_memory


@pytest.mark.parametrize(
    ("row", "new_tokens", "mean_context"),
    [
        (Row("p", Phase.PREFILL, 1, 50), 1, None),
        # First token, warm-up, one round; the steps measured attend to 16 + 4 + 1 … 16 + 4 + 10 tokens.
        (Row("short", Phase.DECODE, 2, 16), 1 + 4 + 10, 25.5),
        # The same sequences for all three rounds.
        (Row("long", Phase.DECODE, 2, 60), 1 + 4 + 30, 60 + 4 + 15.5),
    ],
)
def test_the_mean_context_is_that_of_the_measured_steps(
    row: Row, new_tokens: int, mean_context: float | None
) -> None:
    assert PLAN.num_new_tokens(row) == new_tokens
    if mean_context is None:
        assert row_work(SHAPE, row, PLAN) == prefill_work(SHAPE, row.context)
    else:
        assert PLAN.mean_context(row) == mean_context
        assert row_work(SHAPE, row, PLAN) == decode_work(SHAPE, row.batch, mean_context)


@pytest.mark.parametrize("tied", [True, False])
def test_the_shape_counts_the_head_once_and_the_embedding_not(tmp_path: Path, tied: bool) -> None:
    """The tiny llama's products, one by one."""
    folder = tiny_model(tmp_path, tie_word_embeddings=tied)
    model = load_model(ModelConfig(id=str(folder), device="cpu", compile="off"))
    shape = read_shape(folder, model.layout(block_size=16))
    hidden, intermediate, layers, heads, kv_heads, head_dim = 64, 128, 2, 4, 2, 16
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    layer = attention + 3 * hidden * intermediate + 2 * hidden
    assert shape == ModelShape(
        num_layer_weights=layers * layer + hidden,
        num_head_weights=512 * hidden,
        num_query_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        windows=(None, None),
        itemsize=4,
    )


def test_the_windows_of_a_family_are_those_of_its_layers(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "gemma2")
    model = load_model(ModelConfig(id=str(folder), device="cpu", compile="off"))
    shape = read_shape(folder, model.layout(block_size=16))
    assert shape is not None
    assert shape.windows == (24, None)


def test_a_mixture_of_experts_has_no_limit_that_its_shape_tells(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "qwen3_moe")
    model = load_model(ModelConfig(id=str(folder), device="cpu", compile="off"))
    assert read_shape(folder, model.layout(block_size=16)) is None


def test_the_rows_have_the_names_that_programs_know() -> None:
    assert [row.name for row in ROWS] == [
        "prefill_128",
        "prefill_1024",
        "prefill_4096",
        "decode_b1",
        "decode_b8",
        "decode_b32",
        "decode_b64",
        "decode_b8_c512",
        "decode_b8_c2048",
        "decode_b32_c512",
    ]


def test_rows_are_chosen_by_name_and_keep_their_order() -> None:
    assert [row.name for row in parse_rows("decode_b8, prefill_128")] == ["prefill_128", "decode_b8"]
    with pytest.raises(ValueError, match=r"there is no row 'b8'; there are prefill_128, .*decode_b32_c512"):
        parse_rows("b8")
