"""What one sequence tells its client, in order: Started, Deltas, Finished. The fronts put it on the wire."""

from __future__ import annotations

from dataclasses import dataclass

from router.text.transcript import Ending, Piece


@dataclass(frozen=True, slots=True)
class Started:
    index: int
    request_id: str
    prompt_token_ids: tuple[int, ...]
    cached_tokens: int
    prefill_worker: str
    decode_worker: str

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


@dataclass(frozen=True, slots=True)
class Delta:
    index: int
    piece: Piece


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    draft_tokens: int
    accepted_draft_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """As in the proto."""

    queue_ms: float
    prefill_ms: float
    transfer_ms: float
    transfer_bytes: int
    ttft_ms: float
    decode_ms: float
    mean_itl_ms: float
    handover_ms: float
    decode_start_ms: float
    hidden_bytes: int
    reserve_ms: float


@dataclass(frozen=True, slots=True)
class Finished:
    index: int
    ending: Ending
    usage: Usage
    timings: Timings
    num_resumes: int
    # Of the last attempt.
    prefill_worker: str
    decode_worker: str


Output = Started | Delta | Finished
