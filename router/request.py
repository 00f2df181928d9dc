"""One sequence that a client asked for, on its way through the router.

    RECEIVED → QUEUED → RESERVED → PREFILLING → STREAMING → DONE
                  ↑________|___________|____________|    (resume: its workers were lost)
    any → DONE

A request with n > 1 is n of these with one request_id.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from pdserve.v1 import generation_pb2, worker_pb2
from pdserve.v1.errors import DataLoss, PdserveError
from router.deadline import Deadline
from router.events import LifetimeEvent, Moment
from router.loss import AttemptLost, Verdict, terminal
from router.text.transcript import Transcript
from router.tokens import HandOver, PrefillReport
from router.trace import RequestTrace


class RequestState(Enum):
    RECEIVED = "received"
    QUEUED = "queued"
    RESERVED = "reserved"
    PREFILLING = "prefilling"
    STREAMING = "streaming"
    DONE = "done"


_S = RequestState
MOVES: dict[RequestState, frozenset[RequestState]] = {
    _S.RECEIVED: frozenset({_S.QUEUED, _S.DONE}),
    _S.QUEUED: frozenset({_S.RESERVED, _S.DONE}),
    _S.RESERVED: frozenset({_S.PREFILLING, _S.QUEUED, _S.DONE}),
    _S.PREFILLING: frozenset({_S.STREAMING, _S.QUEUED, _S.DONE}),
    _S.STREAMING: frozenset({_S.QUEUED, _S.DONE}),
    _S.DONE: frozenset(),
}


class IllegalMove(Exception):
    """A request went where its state machine does not lead: a bug."""


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """What all attempts at a sequence have in common. The three messages are forwarded as they are;
    seed and max_tokens are set in them."""

    request_id: str
    transfer_id: str
    index: int
    prompt_token_ids: tuple[int, ...]
    sampling: generation_pb2.SamplingParams
    stop: generation_pb2.StopConditions
    output: generation_pb2.OutputOptions


@dataclass(slots=True)
class Timeline:
    """Monotonic seconds of the router's clock, and what the workers measured."""

    received_at: float
    # The last time before its first prefill began.
    left_queue_at: float | None = None
    prefill_begun_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    report: PrefillReport | None = None
    transfer_ms: float = 0.0
    transfer_bytes: int = 0
    hidden_bytes: int = 0
    # The last one, where workers were lost.
    handover: HandOver | None = None


@dataclass(slots=True)
class Affinity:
    """Where the first of n sequences ran: the others find its blocks in the caches there."""

    prefill_instance: str | None = None
    decode_instance: str | None = None


@dataclass(slots=True)
class Request:
    plan: SequencePlan
    transcript: Transcript
    timeline: Timeline
    deadline: Deadline
    retry_budget: int
    listener: Callable[[LifetimeEvent], None]
    trace: RequestTrace = field(default_factory=RequestTrace)
    affinity: Affinity = field(default_factory=Affinity)
    # Its blocks are in the caches of both workers, or it is over.
    is_warm: asyncio.Event = field(default_factory=asyncio.Event)
    state: RequestState = RequestState.RECEIVED
    num_attempts: int = 0
    num_losses: int = 0
    # Attempts that were made again elsewhere and cost nothing.
    num_moves: int = 0
    # Attempts in a row that found no room.
    num_refusals: int = 0
    # Workers that lost an attempt of this request: others are tried first.
    avoid: set[str] = field(default_factory=set)
    last_error: PdserveError | None = None

    @property
    def num_resumes(self) -> int:
        return self.num_losses + self.num_moves

    @property
    def is_done(self) -> bool:
        return self.state is RequestState.DONE

    def move(self, to: RequestState) -> None:
        if to not in MOVES[self.state]:
            raise IllegalMove(f"{self.plan.transfer_id}: {self.state.value} → {to.value}")
        self.state = to

    def tell(
        self,
        moment: Moment,
        worker: str | None = None,
        *,
        outcome: str | None = None,
        at: float | None = None,
    ) -> None:
        request_id, transfer_id = self.plan.request_id, self.plan.transfer_id
        now = time.monotonic() if at is None else at
        event = LifetimeEvent(moment, request_id, transfer_id, worker, now, outcome, self.trace.trace_id)
        self.listener(event)
        self.trace.note_moment(event)

    def lose(self, loss: AttemptLost) -> None:
        """Back to the queue; raises the client's error where there is nothing left to try."""
        previous, self.last_error = self.last_error, loss.error
        if loss.verdict is Verdict.WAIT:
            self.num_refusals += 1
        elif loss.verdict is Verdict.MOVE:
            self.num_refusals = 0
            self.num_moves += 1
        else:
            self.num_refusals = 0
            self.num_losses += 1
            is_twice_damaged = isinstance(loss.error, DataLoss) and isinstance(previous, DataLoss)
            if self.num_losses > self.retry_budget or is_twice_damaged:
                num_tokens = len(self.transcript.token_ids)
                raise terminal(loss.error, num_tokens=num_tokens, num_losses=self.num_losses) from loss
        if self.state is not RequestState.QUEUED:
            self.move(RequestState.QUEUED)

    def spec(self, epoch: int, known_token_ids: tuple[int, ...]) -> worker_pb2.SequenceSpec:
        return worker_pb2.SequenceSpec(
            transfer_id=self.plan.transfer_id,
            epoch=epoch,
            prompt_token_ids=self.plan.prompt_token_ids,
            known_token_ids=known_token_ids,
            sampling=self.plan.sampling,
            stop=self.plan.stop,
            output=self.plan.output,
        )
