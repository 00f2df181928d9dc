"""Quantiles and rates of the last seconds."""

from __future__ import annotations

import random

import pytest

from router.recent.window import WINDOW_S, RecentQuantiles, RecentRate


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_quantiles_are_within_five_percent() -> None:
    clock = Clock()
    window, draw = RecentQuantiles(clock), random.Random(1)
    values = sorted(draw.lognormvariate(3, 1) for _ in range(5000))
    for value in values:
        window.add(value)
    clock.now += 1
    read = window.read()
    assert read.count == 5000
    assert read.p50 == pytest.approx(values[2499], rel=0.05)
    assert read.p99 == pytest.approx(values[4949], rel=0.05)


def test_what_is_older_than_the_window_counts_no_more() -> None:
    clock = Clock()
    rate, quantiles = RecentRate(clock), RecentQuantiles(clock)
    rate.add(50)
    quantiles.add(10.0)
    for step in range(1, WINDOW_S + 3):
        clock.now = 1000.0 + step
        is_in = step <= WINDOW_S
        assert rate.per_s == (50 / WINDOW_S if is_in else 0)
        assert quantiles.read().count == (1 if is_in else 0)


def test_a_cell_that_comes_round_again_begins_at_nothing() -> None:
    clock = Clock()
    rate = RecentRate(clock)
    for second in range(100):
        clock.now = 1000.0 + second
        rate.add(7)
    clock.now += 1
    assert rate.count == 7 * WINDOW_S


def test_values_outside_of_all_bounds_are_counted_at_the_ends() -> None:
    clock = Clock()
    window = RecentQuantiles(clock)
    for value in (0.0, -1.0, 1e-9, 1e12):
        window.add(value)
    clock.now += 1
    read = window.read()
    assert read.count == 4
    assert 0 < read.p50 < 0.01
    assert read.p99 > 1e6
