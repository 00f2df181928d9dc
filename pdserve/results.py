"""What the client hands out of answers and of the model: frozen values with the names of the protos."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class FinishReason(Enum):
    EOS = "eos"
    STOP = "stop"  # a stop string or a stop token id
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]  # best first


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    draft_tokens: int
    accepted_draft_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    queue_ms: float
    prefill_ms: float
    transfer_ms: float
    transfer_bytes: int
    ttft_ms: float
    decode_ms: float
    mean_itl_ms: float
    # From the prefill worker's first token to all KV on the decode worker, and to the first step there.
    handover_ms: float
    decode_start_ms: float
    # Of the bytes: those that were there by then.
    hidden_bytes: int
    # Of queue_ms: until a decode worker had blocks for it.
    reserve_ms: float


@dataclass(frozen=True, slots=True)
class Started:
    """With the first token of sequence `index`."""

    index: int
    prompt_tokens: int
    cached_tokens: int
    prefill_worker: str
    decode_worker: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Delta:
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]  # one for each token id, if asked for


@dataclass(frozen=True, slots=True)
class Finished:
    index: int
    finish_reason: FinishReason
    matched_stop: str | None
    matched_token_id: int | None
    usage: Usage
    timings: Timings
    num_resumes: int
    # Of the last attempt; Started names those of the first.
    prefill_worker: str
    decode_worker: str


Event = Started | Delta | Finished


@dataclass(frozen=True, slots=True)
class Completion:
    """One of the n sequences, whole."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]
    finish_reason: FinishReason
    matched_stop: str | None
    matched_token_id: int | None
    usage: Usage
    timings: Timings
    num_resumes: int
    prefill_worker: str
    decode_worker: str


@dataclass(frozen=True, slots=True)
class Generation:
    """The whole answer. The plain properties speak of the first sequence."""

    request_id: str
    completions: tuple[Completion, ...]

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.completions[0].finish_reason

    @property
    def usage(self) -> Usage:
        return self.completions[0].usage

    @property
    def timings(self) -> Timings:
        return self.completions[0].timings

    @property
    def prefill_worker(self) -> str:
        return self.completions[0].prefill_worker

    @property
    def decode_worker(self) -> str:
        return self.completions[0].decode_worker


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Enough to count the operations and bytes that a token takes."""

    num_layer_weights: int  # all but the embedding and the head
    num_head_weights: int  # what makes logits of a token; may be the embedding itself
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]  # of each layer: tokens that it attends to at most


@dataclass(frozen=True, slots=True)
class Model:
    id: str
    max_model_len: int
    vocab_size: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    # None where not every weight takes part in every token, or the router does not know them.
    shape: ModelShape | None
