"""Whose prompt goes on in the next step: the shortest first, looked at anew before each.

What is left of a prompt counts, so a short one that comes while a long one is computed goes before the rest
of it: shortest remaining processing time (Schrage, "A proof of the optimality of the shortest remaining
processing time discipline", 1968), which has the least mean time to the first token of all orders, with an
age from which on nobody is overtaken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from engine.sequence import Sequence, SequenceState


class ShortestFirst:
    """A sequence counts for less the longer it is here, and from `aging_s` on for nothing: then it goes by
    its arrival, before all that came later. So nothing starves, however many short ones come.
    """

    def __init__(self, aging_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: the one of `accepted_at_s`."""
        self._aging_s = aging_s
        self._clock = clock

    def ordered(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        now = self._clock()

        def rank(sequence: Sequence) -> tuple[float, int]:
            age = (now - sequence.accepted_at_s) / self._aging_s
            return num_left(sequence) * max(0.0, 1.0 - age), sequence.arrival

        return sorted(sequences, key=rank)


def num_left(sequence: Sequence) -> int:
    """Tokens to compute until it draws its first one. Of one that has not begun, what the cache had when it
    came is taken off; of one that was preempted in the middle of its answer nothing is left of its prompt.
    """
    if sequence.num_new_tokens:
        return 0
    if sequence.state is SequenceState.WAITING:
        return sequence.num_tokens - sequence.num_likely_hits
    return sequence.num_missing_tokens
