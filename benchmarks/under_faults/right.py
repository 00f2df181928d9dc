"""Were the tokens those of the undisturbed run?

Kernels differ in the last bits between batch shapes. A difference is excused only where the model's own two
best (perturbed) scores lie so near that either is right; from there on that answer is not compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.under_faults.answers import Answer, End
from benchmarks.under_faults.asks import Ask
from tests.reference_sampler import next_scores
from tests.unit.engine.driving import TIE, Reference


@dataclass(frozen=True, slots=True)
class Comparison:
    num_compared: int
    num_ties: int
    # Numbers of the asks whose tokens were others.
    wrong: tuple[int, ...]


def compare(answers: Sequence[Answer], undisturbed: Mapping[int, Sequence[int]], folder: Path) -> Comparison:
    """Of answers that were cut short, what there is. `folder`: the model's, for ties."""
    judge: Reference | None = None
    num_ties, wrong = 0, []
    for answer in answers:
        expected = undisturbed[answer.ask.number]
        where = _first_difference(answer.ids, expected, is_whole=answer.end is End.WHOLE)
        if where is None:
            continue
        judge = judge or Reference(folder)
        if where < min(len(answer.ids), len(expected)) and _is_tie(
            judge, answer.ask, expected, where, answer.ids[where]
        ):
            num_ties += 1
        else:
            wrong.append(answer.ask.number)
    return Comparison(len(answers), num_ties, tuple(wrong))


def _first_difference(ids: Sequence[int], expected: Sequence[int], is_whole: bool) -> int | None:
    for position, (one, other) in enumerate(zip(ids, expected, strict=False)):
        if one != other:
            return position
    is_length_right = len(ids) == len(expected) if is_whole else len(ids) <= len(expected)
    return None if is_length_right else min(len(ids), len(expected))


def _is_tie(judge: Reference, ask: Ask, expected: Sequence[int], where: int, drawn: int) -> bool:
    known = expected[:where]
    logits = judge.scores([*ask.prompt, *known])[-1]
    scores = next_scores(logits, ask.prompt, known, ask.options())
    return bool(abs(scores[drawn] - scores[expected[where]]) < TIE)
