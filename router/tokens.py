"""A token on its way from a worker to a client, and what a worker says of a prefill."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.v1 import generation_pb2, worker_pb2
from pdserve.v1.errors import Unavailable

_FINISH_REASONS = frozenset(generation_pb2.FinishReason.values())


@dataclass(frozen=True, slots=True)
class PrefillReport:
    cached_tokens: int
    # At the worker until the first token, less prefill_ms.
    queue_ms: float
    # Of the steps that computed some of the prompt.
    prefill_ms: float


@dataclass(frozen=True, slots=True)
class HandOver:
    """From the prefill worker's drawing of the first token, by the workers' clocks."""

    # → the decode worker has all KV.
    ready_ms: float
    # → its first step with the sequence began.
    first_step_ms: float


@dataclass(frozen=True, slots=True)
class Token:
    # Index in the output, known tokens counted.
    position: int
    token_id: int
    # Forwarded to the client as it came.
    logprobs: generation_pb2.PositionLogprobs | None = None
    # Set on the last token, where the worker ended the sequence.
    finish_reason: generation_pb2.FinishReason | None = None
    report: PrefillReport | None = None
    # Whether it had been guessed, and how many were in the step that it begins.
    was_drafted: bool = False
    num_drafts: int = 0
    # Set on the first token that a decode worker drew of what it was handed.
    handover: HandOver | None = None


def token_of(message: worker_pb2.TokenOutput) -> Token:
    """Raises Unavailable where it ends a sequence in a way that there is not."""
    if message.finish_reason not in _FINISH_REASONS:
        raise Unavailable(f"finish reason {message.finish_reason}", reason="MALFORMED")
    report: PrefillReport | None = None
    if message.HasField("prefill"):
        prefill = message.prefill
        report = PrefillReport(prefill.cached_tokens, prefill.queue_ms, prefill.prefill_ms)
    handover: HandOver | None = None
    if message.HasField("handover"):
        handover = HandOver(message.handover.ready_ms, message.handover.first_step_ms)
    return Token(
        position=message.position,
        token_id=message.token_id,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        finish_reason=message.finish_reason or None,
        report=report,
        was_drafted=message.was_drafted,
        num_drafts=message.num_drafts,
        handover=handover,
    )
