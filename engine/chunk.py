"""One sequence's part in a step."""

from __future__ import annotations

from typing import NamedTuple

from engine.batch import BatchRow
from engine.sequence import Sequence


class Chunk(NamedTuple):
    """Tokens `[start, end)` of one sequence, and drafts of those behind them, to compute in this step."""

    sequence: Sequence
    start: int
    end: int
    is_sampling: bool  # it closes the gap, so its last row draws the next token
    drafts: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.end - self.start + len(self.drafts)

    @property
    def num_draws(self) -> int:
        """Behind the last token, and behind each draft: that one counts if the drafts up to it are right."""
        return 1 + len(self.drafts) if self.is_sampling else 0

    def row(self) -> BatchRow:
        token_ids = self.sequence.token_ids[self.start : self.end]
        token_ids += self.drafts
        return BatchRow(token_ids, self.start, self.sequence.block_table)
