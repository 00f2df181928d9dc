"""What goes into the engine and what comes out of a step: plain values, no state.

Those made for every token are named tuples: a frozen dataclass takes several times as long to make.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from engine.grammar import Grammar
from engine.sampling import FinishReason, PositionLogprobs, SamplingParams, StopConditions


class Until(Enum):
    """How far this engine runs a sequence."""

    FIRST_TOKEN = "first_token"  # a prefill worker's: its first new token is its last here
    FINISH = "finish"


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """One sequence to run.

    `known_token_ids` is output that exists already (a resumed sequence): it is computed like the prompt,
    and sampling goes on behind it. `sequence_id` is unique among the living and the held. `grammar` has the
    known output behind it.
    With `hold_blocks` the sequence is never preempted, and its blocks stay held after it leaves, whatever
    the reason, until `Engine.release_hold`.
    """

    sequence_id: str
    prompt_token_ids: tuple[int, ...]
    known_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopConditions
    until: Until = Until.FINISH
    hold_blocks: bool = False
    grammar: Grammar | None = None


class NewToken(NamedTuple):
    """`position` is the index in the output; known tokens count."""

    position: int
    token_id: int
    logprobs: PositionLogprobs | None
    was_drafted: bool = False  # a draft that turned out right


@dataclass(frozen=True, slots=True)
class PrefillReport:
    """How a sequence's first new token came about."""

    cached_tokens: int  # prompt tokens found in the prefix cache
    queue_ms: float  # accepted → first token sampled, less prefill_ms: also while others went first
    prefill_ms: float  # of the steps that computed some of it


class SequenceOutput(NamedTuple):
    """One sequence's share of one step.

    Blocks `[0, num_computed_tokens // block_size)` of its table are final and will not be written again.
    """

    sequence_id: str
    num_computed_tokens: int
    new_tokens: tuple[NewToken, ...]  # empty after a chunk that is not the last
    finish_reason: (
        FinishReason | None
    )  # None on the last output of Until.FIRST_TOKEN if the token ends nothing
    is_last: bool  # the engine has let go of the sequence
    prefill: PrefillReport | None = None  # with the first new token of a sequence prefilled here
    num_drafts: int = 0  # verified in this step, right or wrong
    error: str | None = None  # it broke (is_last is set): no token, no finish reason
    is_refused: bool = False  # with an error: what was asked for is at fault, and no worker can do it


@dataclass(frozen=True, slots=True)
class StepResult:
    outputs: tuple[SequenceOutput, ...]
    step_ms: float


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What one engine can take at all; fixed from its start."""

    max_model_len: int
    block_size: int
    max_num_seqs: int
    num_blocks: int
    max_sequence_tokens: int  # prompt and output of one sequence that has the pool to itself
    vocab_size: int


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What it is doing now, and five counters that never go down."""

    num_running: int
    num_waiting: int  # preempted ones too
    num_reservations: int
    queued_prompt_tokens: int  # accepted and not computed yet
    blocks_total: int
    blocks_free: int  # what an allocation could take: free, or cached without a holder
    blocks_used: int  # the rest: held, reserved or quarantined
    blocks_reserved: int
    blocks_quarantined: int
    tokens_prefilled: int
    tokens_decoded: int
    num_preemptions: int
    draft_tokens: int  # guessed and computed; those that were right are among the decoded ones
    accepted_draft_tokens: int
