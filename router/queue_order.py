"""Who leaves the router's queue next: a pure function of how long a prompt is and how long it has waited."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from router.config import QueueOrder

Rank = tuple[float, float]
"""The smallest goes first."""


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    order: QueueOrder
    # Of SHORTEST: who has waited for so long is overtaken by nobody who came later.
    aging_s: float

    def rank(self, num_uncached_tokens: int, waited_s: float) -> Rank:
        """`num_uncached_tokens`: of the prompt, those that a worker would have to compute."""
        return _RANKS[self.order](num_uncached_tokens, waited_s, self.aging_s)


def _fcfs(num_uncached_tokens: int, waited_s: float, aging_s: float) -> Rank:
    return (0.0, -waited_s)


def _shortest(num_uncached_tokens: int, waited_s: float, aging_s: float) -> Rank:
    """A prompt counts for less the longer it waits, and from `aging_s` on for nothing: then it goes by its
    arrival, before all that came later. So nothing starves, however many short ones come.
    """
    return (num_uncached_tokens * max(0.0, 1.0 - waited_s / aging_s), -waited_s)


_RANKS: dict[QueueOrder, Callable[[int, float, float], Rank]] = {
    QueueOrder.FCFS: _fcfs,
    QueueOrder.SHORTEST: _shortest,
}
