"""The last seconds' values, for who looks at the cluster now: quantiles to within 5 %, and rates.

Counts in buckets whose bounds grow by 9 %, one set for each second, so that a value costs one addition,
however many there are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from pdserve.v1 import cluster_pb2

WINDOW_S = 10

_PER_OCTAVE = 8
# 2⁻⁸ ms to 2²⁴ ms (over four hours).
_LOWEST, _HIGHEST = -8 * _PER_OCTAVE, 24 * _PER_OCTAVE

Clock = Callable[[], float]


class _Slots:
    """One cell for each second of the window, emptied as it comes round again. The current second is left
    out of sums, as it is not whole."""

    def __init__(self, num_buckets: int, clock: Clock) -> None:
        self._cells = [[0] * num_buckets for _ in range(WINDOW_S + 1)]
        # The second whose counts a cell holds.
        self._seconds = [0] * (WINDOW_S + 1)
        self._clock = clock

    def add(self, bucket: int, count: int) -> None:
        second = int(self._clock())
        place = second % (WINDOW_S + 1)
        if self._seconds[place] != second:
            self._seconds[place] = second
            self._cells[place] = [0] * len(self._cells[place])
        self._cells[place][bucket] += count

    def sums(self) -> list[int]:
        now = int(self._clock())
        known = zip(self._seconds, self._cells, strict=True)
        recent = [cells for second, cells in known if now - WINDOW_S <= second < now]
        return [sum(column) for column in zip(*recent, strict=True)]


class RecentRate:
    """Events a second."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._slots = _Slots(1, clock)

    def add(self, count: int) -> None:
        self._slots.add(0, count)

    @property
    def count(self) -> int:
        """In the whole window."""
        return sum(self._slots.sums())

    @property
    def per_s(self) -> float:
        return self.count / WINDOW_S


class RecentQuantiles:
    """Of durations in milliseconds."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._slots = _Slots(_HIGHEST - _LOWEST + 1, clock)

    def add(self, ms: float) -> None:
        bucket = round(math.log2(ms) * _PER_OCTAVE) if ms > 0 else _LOWEST
        self._slots.add(min(max(bucket, _LOWEST), _HIGHEST) - _LOWEST, 1)

    def read(self) -> cluster_pb2.Quantiles:
        counts = self._slots.sums()
        count = sum(counts)
        if not count:
            return cluster_pb2.Quantiles()
        return cluster_pb2.Quantiles(
            count=count, p50=_quantile(counts, count * 0.5), p99=_quantile(counts, count * 0.99)
        )


def _quantile(counts: Iterable[int], rank: float) -> float:
    """The middle of the bucket where the values up to it reach `rank`; there is one."""
    reached, last = 0, 0
    for bucket, count in enumerate(counts):
        if count:
            reached, last = reached + count, bucket
            if reached >= rank:
                break
    middle: float = 2 ** ((last + _LOWEST) / _PER_OCTAVE)
    return middle
