"""The picture of ITL over time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from pdserve.bench.serve.plot import plot_itl
from tests.unit.bench.serve.made import record

figure = pytest.importorskip("matplotlib.figure")


def lines(*arrivals: Sequence[float]) -> dict[str, list[tuple[float, float]]]:
    """By label: (second, ms)."""
    axes = figure.Figure().subplots()
    plot_itl(axes, [record(each) for each in arrivals])
    return {
        line.get_label(): [(float(x), float(y)) for x, y in zip(*line.get_data(), strict=True)]
        for line in axes.get_lines()
    }


def steady(begin_s: float, end_s: float, step_s: float = 0.1) -> list[float]:
    return [begin_s + number * step_s for number in range(round((end_s - begin_s) / step_s) + 1)]


def test_a_line_is_interrupted_while_nobody_is_answered() -> None:
    drawn = lines(steady(0.0, 10.0), steady(30.0, 40.0))
    assert set(drawn) == {"p50", "p99", "largest"}
    for points in drawn.values():
        idle = [at_s for at_s, value in points if math.isnan(value)]
        assert idle
        assert all(10.0 < at_s < 30.5 for at_s in idle)
        assert all(value == pytest.approx(100) for _, value in points if not math.isnan(value))
        assert {at_s < 20 for at_s, value in points if not math.isnan(value)} == {True, False}


def test_a_stall_is_no_interruption() -> None:
    points = lines([*steady(0.0, 10.0), *steady(30.0, 40.0)])["largest"]
    assert not any(math.isnan(value) for _, value in points)
    assert max(value for _, value in points) == pytest.approx(20_000)


def test_without_gaps_there_is_no_line() -> None:
    assert lines([1.0]) == {}
    assert lines() == {}
