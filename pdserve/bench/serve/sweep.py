"""The highest rate that a server carries within its objectives: where attainment over rate falls through a
target.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from pdserve.bench.errors import BenchError

TARGET = 0.9
# The search ends when two rates on both sides of the target are this close.
_NARROW = 1.15
_MAX_POINTS = 12

Measure = Callable[[float], Awaitable[float]]
"""Attainment (0 to 1) at a rate in requests a second."""


@dataclass(frozen=True, slots=True)
class Point:
    rate: float
    attainment: float


@dataclass(frozen=True, slots=True)
class Crossing:
    """`rate` is interpolated between two points. None: no point lies below the target (`is_above`: the
    goodput is at least the highest rate), or already the lowest does (it is less than that).
    """

    rate: float | None
    is_above: bool
    points: tuple[Point, ...]  # by rate
    target: float


@dataclass(frozen=True, slots=True)
class Search:
    """For the goodput: see `find_goodput`."""

    rates: tuple[float, ...]
    target: float


async def find_goodput(measure: Measure, rates: Sequence[float], target: float = TARGET) -> Crossing:
    """Measures at each of `rates`. Of one alone it goes on: doubles or halves until the target lies between
    two rates, then halves between those.
    """
    if not rates or min(rates) <= 0:
        raise BenchError("rates have to be above 0, and there has to be one")
    points = [Point(rate, await measure(rate)) for rate in sorted(set(rates))]
    if len(points) == 1:
        while (rate := next_rate(points, target)) is not None:
            points.append(Point(rate, await measure(rate)))
    return crossing(points, target)


def crossing(points: Iterable[Point], target: float = TARGET) -> Crossing:
    """The first fall through the target, between neighbours by rate, in a straight line."""
    ordered = tuple(sorted(points, key=lambda point: point.rate))
    if not ordered:
        raise BenchError("nothing was measured")
    below = next((index for index, point in enumerate(ordered) if point.attainment < target), None)
    if below is None or below == 0:
        return Crossing(None, below is None, ordered, target)
    low, high = ordered[below - 1], ordered[below]
    share = (low.attainment - target) / (low.attainment - high.attainment)
    return Crossing(low.rate + share * (high.rate - low.rate), False, ordered, target)


def next_rate(points: Sequence[Point], target: float) -> float | None:
    """Where to measure next; None: it is known well enough, or too much was tried."""
    if len(points) >= _MAX_POINTS:
        return None
    ordered = sorted(points, key=lambda point: point.rate)
    below = next((index for index, point in enumerate(ordered) if point.attainment < target), None)
    if below is None:
        return ordered[-1].rate * 2
    if below == 0:
        return ordered[0].rate / 2
    low, high = ordered[below - 1].rate, ordered[below].rate
    return None if high / low <= _NARROW else (low * high) ** 0.5
