"""Rounds of rows, on engines that are scripted and on ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from engine.config import ModelConfig
from engine.engine import Engine
from engine.loading import LoadedModel, load_model
from pdserve.bench.measure import Bench, RowResult, measure_row
from pdserve.bench.ours import OurEngine, engine_config
from pdserve.bench.rows import Phase, Plan, Row
from pdserve.bench.subject import Timed
from pdserve.bench.work import ModelShape, Rates
from tests.models import tiny_model

SHAPE = ModelShape(10, 4, 2, 1, 3, (None,), 2)
PREFILL = Row("prefill", Phase.PREFILL, 1, 50)
SHORT = Row("short", Phase.DECODE, 4, 16)
LONG = Row("long", Phase.DECODE, 4, 60)
PLAN = Plan(num_rounds=3, num_steps=10, num_warm_steps=2, max_refilled_tokens=100)


class Scripted:
    """A Subject that takes as long as it is told, and writes down what it was asked."""

    def __init__(self, name: str, asked: list[str], seconds: Iterator[float]) -> None:
        self._name = name
        self._asked = asked
        self._seconds = seconds
        self._batch = 0

    def prefill(self, prompt: Sequence[int]) -> Timed:
        self._asked.append(f"{self._name} prefill {len(prompt)}")
        return Timed(len(prompt), next(self._seconds))

    def begin(self, prompts: Sequence[Sequence[int]], num_new_tokens: int) -> None:
        self._asked.append(f"{self._name} begin {len(prompts)}x{len(prompts[0])}+{num_new_tokens}")
        self._batch = len(prompts)

    def decode(self, num_steps: int) -> Timed:
        self._asked.append(f"{self._name} decode {num_steps}")
        return Timed(self._batch * num_steps, next(self._seconds))

    def end(self) -> None:
        self._asked.append(f"{self._name} end")


def bench(
    ours: Sequence[float], theirs: Sequence[float] | None = None, shape: ModelShape | None = SHAPE
) -> tuple[Bench, list[str]]:
    asked: list[str] = []

    def measure_rates() -> Rates:
        asked.append("rates")
        return Rates(operations=1000, num_bytes=1000)

    subject = Scripted("ours", asked, iter(ours))
    other = None if theirs is None else Scripted("theirs", asked, iter(theirs))
    return Bench(subject, other, measure_rates, shape, vocab_size=100, plan=PLAN), asked


def test_both_engines_take_turns_in_every_round() -> None:
    a_bench, asked = bench(ours=[9, 1, 2, 3], theirs=[9, 4, 5, 6])
    rounds: list[None] = []
    measured = measure_row(a_bench, PREFILL, lambda: rounds.append(None))
    assert asked == [
        *("ours prefill 50", "theirs prefill 50"),
        *("rates", "ours prefill 50", "theirs prefill 50") * 3,
        *("ours end", "theirs end"),
    ]
    assert len(rounds) == 3
    assert (measured.tok_s, measured.vllm_tok_s, measured.ratio) == (25, 10, 2.5)


def test_short_sequences_begin_anew_in_every_round() -> None:
    a_bench, asked = bench(ours=[9, 2, 9, 1, 9, 4])
    measured = measure_row(a_bench, SHORT, lambda: None)
    assert asked == [
        *("rates", "ours begin 4x16+14", "ours decode 2", "ours decode 10", "ours end") * 3,
        "ours end",
    ]
    assert (measured.tok_s, measured.vllm_tok_s, measured.ratio) == (20, None, None)


def test_long_sequences_go_on_from_round_to_round() -> None:
    a_bench, asked = bench(ours=[9, 2, 1, 4])
    measured = measure_row(a_bench, LONG, lambda: None)
    assert asked == ["ours begin 4x60+34", "ours decode 2", *("rates", "ours decode 10") * 3, "ours end"]
    assert measured.tok_s == 20


def test_the_share_of_the_limit_is_that_of_the_same_work() -> None:
    a_bench, _ = bench(ours=[9, 2, 2, 2])
    measured = measure_row(a_bench, PREFILL, lambda: None)
    # 50 tokens through 10 weights, one through the head, 1275 pairs of 24 operations.
    assert measured.limit_share == pytest.approx((2 * (500 + 4) + 24 * 1275) / 1000 / 2)
    assert measured.is_memory_bound is False
    without_shape, _ = bench(ours=[9, 2, 2, 2], shape=None)
    untold = measure_row(without_shape, PREFILL, lambda: None)
    assert (untold.limit_share, untold.is_memory_bound) == (None, None)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tiny_model(tmp_path_factory.mktemp("models"))
    return load_model(ModelConfig(id=str(folder), device="cpu", compile="off"))


MakeOurs = Callable[[Row], tuple[Engine, OurEngine]]


@pytest.fixture
def make_ours(loaded: LoadedModel) -> Iterator[MakeOurs]:
    engines: list[Engine] = []

    def make(row: Row) -> tuple[Engine, OurEngine]:
        engine = Engine(loaded, engine_config([row], PLAN, max_num_batched_tokens=32))
        engines.append(engine)
        return engine, OurEngine(engine)

    yield make
    for engine in engines:
        engine.check_integrity()
        assert engine.snapshot().blocks_used == 0


@pytest.mark.parametrize("row", [PREFILL, SHORT, LONG], ids=lambda row: row.name)
def test_our_engine_runs_a_row_in_the_room_that_it_is_given(make_ours: MakeOurs, row: Row) -> None:
    engine, ours = make_ours(row)
    a_bench = Bench(ours, None, lambda: Rates(1e12, 1e12), SHAPE, engine.limits.vocab_size, PLAN)
    measured: RowResult = measure_row(a_bench, row, lambda: None)
    assert measured.tok_s > 0
    if row.phase is Phase.DECODE:
        num_begun = 3 if row is SHORT else 1
        drawn = row.batch * (2 * num_begun + 3 * 10)
        assert engine.snapshot().tokens_decoded == drawn


def test_every_step_of_our_engine_decodes_the_whole_batch(make_ours: MakeOurs) -> None:
    engine, ours = make_ours(LONG)
    ours.begin([[1 + i] * LONG.context for i in range(LONG.batch)], num_new_tokens=12)
    assert engine.snapshot().tokens_decoded == 0
    for num_steps in (1, 4):
        before = engine.snapshot().tokens_decoded
        assert ours.decode(num_steps).num_tokens == num_steps * LONG.batch
        assert engine.snapshot().tokens_decoded - before == num_steps * LONG.batch
    ours.end()
