"""Speculative decoding: drafts of how a sequence goes on, computed in one step with its newest token.

A draw is settled by its own logits and noise alone (`engine/noise.py`), so a draft is right where it is the
very token that is drawn there, and what comes out is what would have come out without drafts: no
acceptance by chance is needed, as it is in Leviathan et al. 2023 (arXiv:2211.17192), whose terms these are.
How many drafts are worth their rows is estimated for each sequence by how its proposals fared, also of
those that were not computed: a sequence that stops repeating itself, or begins to, is noticed for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

from engine.config import SpeculativeConfig
from engine.ngram import NgramProposer
from engine.sequence import Sequence

# What one more row adds to a step, as a share of a step of one row. Measured on a CPU with our kernels: 0.03
# to 0.08 in bfloat16, 0.05 to 0.12 in float32. Too high a figure costs little, too low a one slows new text.
ROW_COST = 0.1
# With more rows a step takes as long as its rows: there is nothing to gain, and nothing is proposed.
MAX_ROWS = 32
# Of the newest proposed token in the mean over all of a sequence.
_NEWEST_WEIGHT = 0.1
_NEVER_SURE = 0.01


class Proposer(Protocol):
    def propose(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """How it may go on: at most so many token ids of the vocabulary, none where there is no telling.
        Wrong ones cost time and change nothing.
        """
        ...

    def forget(self, sequence_id: str) -> None:
        """The sequence has left. Also called for those that were never asked about."""
        ...


class Acceptance:
    """How likely the next token proposed for one sequence is right: a moving mean."""

    def __init__(self) -> None:
        self.probability = 0.5

    def note(self, proposed: Iterable[int], drawn: Iterable[int]) -> None:
        """Of a proposal is told what was drawn: all that is right, and the first that is wrong."""
        for guess, token_id in zip(proposed, drawn, strict=False):
            mean = self.probability + _NEWEST_WEIGHT * ((guess == token_id) - self.probability)
            self.probability = min(max(mean, _NEVER_SURE), 1 - _NEVER_SURE)
            if guess != token_id:
                break


class Speculator:
    """Decides what is drafted. Knows nothing of blocks and budgets: `room` is what they leave."""

    def __init__(self, proposer: Proposer, max_tokens: int, row_cost: float = ROW_COST) -> None:
        """At most `max_tokens` drafts for a sequence in a step."""
        self._proposer = proposer
        self._max_tokens = max_tokens
        self._row_cost = row_cost
        self._acceptances: dict[str, Acceptance] = {}
        self._proposed: dict[str, list[int]] = {}  # in the step that runs

    def draft(self, sequence: Sequence, room: int, num_rows: int) -> list[int]:
        """Drafts for a sequence in a step of `num_rows` rows without any."""
        if room < 1 or num_rows > MAX_ROWS:
            return []
        proposed = self._proposer.propose(sequence, min(room, self._max_tokens))
        if not proposed:
            return []
        self._proposed[sequence.sequence_id] = proposed
        acceptance = self._acceptances.setdefault(sequence.sequence_id, Acceptance())
        return proposed[: num_worthwhile(acceptance.probability, num_rows, self._row_cost)]

    def note(self, sequence: Sequence, drawn: Iterable[int]) -> None:
        """What was drawn for it in the step for which it was asked about, if it was."""
        proposed = self._proposed.pop(sequence.sequence_id, None)
        if proposed is not None:
            self._acceptances[sequence.sequence_id].note(proposed, drawn)

    def forget(self, sequence_id: str) -> None:
        self._proposer.forget(sequence_id)
        self._acceptances.pop(sequence_id, None)
        self._proposed.pop(sequence_id, None)


def num_worthwhile(probability: float, num_rows: int, row_cost: float = ROW_COST) -> int:
    """How many drafts of a sequence raise the tokens in a second, if each is right with `probability` where
    those before it are. A step of R rows brings R tokens in `1 + row_cost * (R - 1)` units of time; the k-th
    draft brings probability^k tokens more, for `row_cost` more.
    """
    price = row_cost * num_rows / (1 + row_cost * (num_rows - 1))
    return int(math.log(price) / math.log(probability))


def make_speculator(config: SpeculativeConfig) -> Speculator:
    return Speculator(NgramProposer(config.min_ngram, config.max_ngram), config.max_tokens)
