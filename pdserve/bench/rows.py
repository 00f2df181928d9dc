"""What `pdserve bench engine` measures: the names of its rows and what each stands for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Row:
    """PREFILL: one prompt of `context` tokens, until its first token is drawn. DECODE: the tokens that
    `batch` sequences draw together, one each in a step, behind prompts of `context` tokens; their prefill is
    not timed.
    """

    name: str
    phase: Phase
    batch: int
    context: int


@dataclass(frozen=True, slots=True)
class Plan:
    """How often each row is measured, and how long. The figures are medians over the rounds."""

    num_rounds: int = 5
    num_steps: int = 32  # of decoding, in a round
    num_warm_steps: int = 4
    # Sequences whose prompts have more tokens together are prefilled once, and go on from round to round.
    max_refilled_tokens: int = 2048

    def is_fresh_each_round(self, row: Row) -> bool:
        return row.batch * row.context <= self.max_refilled_tokens

    def num_new_tokens(self, row: Row) -> int:
        """Of each sequence: the first, which its prefill gives, and those of all its steps."""
        if row.phase is Phase.PREFILL:
            return 1
        num_rounds = 1 if self.is_fresh_each_round(row) else self.num_rounds
        return 1 + self.num_warm_steps + num_rounds * self.num_steps

    def max_tokens(self, row: Row) -> int:
        """Of one sequence, prompt and output: one more than it will draw, so that none ends by itself."""
        return row.context + self.num_new_tokens(row) + 1

    def mean_context(self, row: Row) -> float:
        """Tokens that a measured step attends to in each sequence, the new one included."""
        num_measured = self.num_new_tokens(row) - 1 - self.num_warm_steps
        return row.context + self.num_warm_steps + (num_measured + 1) / 2


def _prefill(num_tokens: int) -> Row:
    return Row(f"prefill_{num_tokens}", Phase.PREFILL, 1, num_tokens)


def _decode(batch: int, context: int | None = None) -> Row:
    name = f"decode_b{batch}" if context is None else f"decode_b{batch}_c{context}"
    return Row(name, Phase.DECODE, batch, context or SHORT_CONTEXT)


SHORT_CONTEXT = 16
ROWS = (
    _prefill(128),
    _prefill(1024),
    _prefill(4096),
    _decode(1),
    _decode(8),
    _decode(32),
    _decode(64),
    _decode(8, 512),
    _decode(8, 2048),
    _decode(32, 512),
)


def parse_rows(text: str) -> tuple[Row, ...]:
    """ "prefill_128,decode_b1" → those rows, in the order of the table. Raises ValueError."""
    known = {row.name: row for row in ROWS}
    wanted = {name.strip() for name in text.split(",")}
    unknown = sorted(wanted - set(known))
    if unknown:
        raise ValueError(f"there is no row {unknown[0]!r}; there are {', '.join(known)}")
    return tuple(row for row in ROWS if row.name in wanted)
