"""What a sequence wants: how its tokens are drawn and where it ends. Plain values, checked by the router."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn.

    temperature 0 is greedy. `seed` is always there: the noise of a draw is hashed from
    (seed, output position, token id), so the same request draws the same tokens wherever it runs.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    # None: no logprobs. k: the chosen token's and the k most likely ones'.
    num_logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def is_plain(self) -> bool:
        """Asks for the best token of the logits as they come, and for nothing else."""
        is_adjusted = self.has_penalties or bool(self.logit_bias)
        return self.is_greedy and not is_adjusted and self.num_logprobs is None


@dataclass(frozen=True, slots=True)
class StopConditions:
    """Where a sequence ends. Output tokens that were known from the start count."""

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False


class FinishReason(Enum):
    EOS = "eos"
    STOP = "stop"  # a stop token id; stop strings are the router's
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """log p of one token under the model's own distribution (before temperature, penalties, cuts)."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]  # best first
