"""How long each phase takes on a core of its own: measured at some sizes, in straight lines between them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefillTime:
    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StepTime:
    batch: int
    context: int  # of each sequence
    seconds: float


@dataclass(frozen=True, slots=True)
class _StepLine:
    """seconds = base + slope · (tokens of context, all sequences together)."""

    batch: float
    base: float
    slope: float


class PhaseTimes:
    """Two prompt lengths at least, and two contexts for each of two batches. Raises ValueError."""

    def __init__(self, prefills: Sequence[PrefillTime], steps: Sequence[StepTime]) -> None:
        self.prefills = tuple(sorted(prefills, key=lambda each: each.num_tokens))
        self.steps = tuple(sorted(steps, key=lambda each: (each.batch, each.context)))
        self._lines = _lines(self.steps)
        # By batch, as they are asked for: a simulation asks for few of them, many times.
        self._line_of: dict[int, _StepLine] = {}
        self._points = [(float(each.num_tokens), each.seconds) for each in self.prefills]
        if len(self.prefills) < 2 or len(self._lines) < 2:
            raise ValueError("two prompt lengths and two batches are the least that has a line")

    def prefill_s(self, num_tokens: int) -> float:
        """From a prompt's begin to its first token."""
        return _between(self._points, num_tokens)

    def step_s(self, batch: int, num_context_tokens: int) -> float:
        """One token for each of `batch` sequences, which have so many tokens of context together."""
        line = self._line_of.get(batch) or self._line_of.setdefault(batch, self._line(batch))
        return line.base + line.slope * num_context_tokens

    def _line(self, batch: int) -> _StepLine:
        base = _between([(line.batch, line.base) for line in self._lines], batch)
        slope = _between([(line.batch, line.slope) for line in self._lines], batch, is_level_beyond=True)
        return _StepLine(batch, base, slope)


def _lines(steps: Sequence[StepTime]) -> list[_StepLine]:
    """One for each batch: through its shortest and its longest context."""
    lines = []
    for batch in sorted({each.batch for each in steps}):
        of_batch = [each for each in steps if each.batch == batch]
        short, long = of_batch[0], of_batch[-1]
        if short.context == long.context:
            raise ValueError(f"a batch of {batch} was measured at one context only")
        slope = max(0.0, (long.seconds - short.seconds) / (batch * (long.context - short.context)))
        lines.append(_StepLine(batch, short.seconds - slope * batch * short.context, slope))
    return lines


def _between(points: Sequence[tuple[float, float]], x: float, *, is_level_beyond: bool = False) -> float:
    """Beyond the ends the outermost line goes on, never below 0, unless it is to stay level there."""
    if is_level_beyond:
        x = min(max(x, points[0][0]), points[-1][0])
    right = min(max(1, bisect_left([each for each, _ in points], x)), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0))
