"""What is measured: an engine, ours or another, behind the four things that a row asks of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Timed:
    num_tokens: int
    seconds: float

    @property
    def tok_s(self) -> float:
        return self.num_tokens / self.seconds


class Subject(Protocol):
    """Greedy, without a prefix cache, no end of text. Between calls it computes nothing and takes no core."""

    def prefill(self, prompt: Sequence[int]) -> Timed:
        """From a prompt's arrival until its first token is there; the tokens counted are the prompt's."""

    def begin(self, prompts: Sequence[Sequence[int]], num_new_tokens: int) -> None:
        """Sequences with their first token drawn, which can draw so many in all. Not timed."""

    def decode(self, num_steps: int) -> Timed:
        """So many tokens more for each sequence that has begun."""

    def end(self) -> None:
        """Drops the sequences that have begun."""
