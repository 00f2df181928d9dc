"""Objectives, the share of requests that meet them all, and the rate where it falls through the target."""

from __future__ import annotations

import pytest

from pdserve.bench.errors import BenchError
from pdserve.bench.serve.goodput import Slo, goodput, parse_slo
from pdserve.bench.serve.records import Failure
from pdserve.bench.serve.sweep import Point, crossing, find_goodput
from tests.unit.bench.serve.made import record


def test_attainment_is_joint() -> None:
    slo = Slo(ttft_ms=1000, tpot_ms=100)
    fast, late, slow = record([0.9, 0.95, 1.0]), record([1.1, 1.15]), record([0.5, 1.0])
    failed = record([0.1, 0.2], failure=Failure("ABORTED", "lost"))
    result = goodput([fast, late, slow, failed], slo)
    assert (result.num_met, result.attainment) == (1, 0.25)
    assert result.request_rate == pytest.approx(1 / 1.15)
    assert goodput([], slo).attainment == 0.0


def test_a_stall_that_the_mean_forgives_is_caught_by_tbt() -> None:
    stalled = record([0.1, *(0.1 + 0.02 * step for step in range(1, 10)), 0.9])
    assert Slo(ttft_ms=1000, tpot_ms=100).is_met(stalled)
    assert not Slo(ttft_ms=1000, tpot_ms=100, tbt_ms=100).is_met(stalled)


def test_one_token_can_only_be_late() -> None:
    assert Slo(ttft_ms=300, tpot_ms=1, tbt_ms=1).is_met(record([0.2]))
    assert not Slo(e2el_ms=100).is_met(record([0.2]))


@pytest.mark.parametrize("parts", [["ttft:2000", "tpot:40"], ["ttft:2000 tpot:40"], ["ttft:2000,tpot:40"]])
def test_objectives_are_written_as_name_and_milliseconds(parts: list[str]) -> None:
    slo = parse_slo(parts)
    assert slo == Slo(ttft_ms=2000, tpot_ms=40)
    assert str(slo) == "ttft:2000 tpot:40"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no limit is set"),
        ("ttft", "NAME:MILLISECONDS"),
        ("ttft:fast", "NAME:MILLISECONDS"),
        ("speed:1", "limits are set on ttft, tpot, tbt, e2el"),
        ("tpot:0", "a limit is above 0"),
        ("tpot:nan", "a limit is above 0"),
        ("tpot:inf", "no infinity"),  # nor has JSON
    ],
)
def test_other_objectives_are_refused(text: str, told: str) -> None:
    with pytest.raises(BenchError, match=told):
        parse_slo([text])


def test_the_crossing_is_interpolated() -> None:
    found = crossing([Point(2.0, 0.7), Point(1.0, 1.0), Point(4.0, 0.1)])
    assert found.rate == pytest.approx(4 / 3)
    assert [point.rate for point in found.points] == [1.0, 2.0, 4.0]


def test_the_first_fall_counts() -> None:
    noisy = [Point(1.0, 1.0), Point(2.0, 0.8), Point(3.0, 0.95), Point(4.0, 0.0)]
    assert crossing(noisy).rate == pytest.approx(1.5)


def test_a_curve_on_one_side_of_the_target_has_no_crossing() -> None:
    above = crossing([Point(1.0, 1.0), Point(2.0, 0.9)])
    below = crossing([Point(1.0, 0.5), Point(2.0, 0.1)])
    assert (above.rate, above.is_above) == (None, True)
    assert (below.rate, below.is_above) == (None, False)


@pytest.mark.parametrize("start", [0.1, 1.0, 3.1, 50.0])
async def test_a_search_from_one_rate_finds_the_target(start: float) -> None:
    asked = []

    async def measure(rate: float) -> float:
        asked.append(rate)
        return min(1.0, 3.0 / rate)  # 0.9 at 10/3

    found = await find_goodput(measure, [start])
    assert found.rate == pytest.approx(10 / 3, rel=0.03)
    assert len(asked) == len(set(asked)) == len(found.points) <= 12


async def test_given_rates_are_all_measured_once_in_order() -> None:
    asked = []

    async def measure(rate: float) -> float:
        asked.append(rate)
        return 0.0

    found = await find_goodput(measure, [2.0, 1.0, 2.0])
    assert asked == [1.0, 2.0]
    assert found.rate is None


async def test_a_search_that_never_crosses_ends() -> None:
    async def always(rate: float) -> float:
        return 1.0

    found = await find_goodput(always, [1.0])
    assert (found.rate, found.is_above, len(found.points)) == (None, True, 12)
    with pytest.raises(BenchError, match="rates have to be above 0"):
        await find_goodput(always, [])
