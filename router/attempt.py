"""One try at a sequence: its number, its tokens' inbox, and everything that is held for it."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from observability.origin import Metadata
from observability.tracing import Attributes, Span
from pdserve.v1 import worker_pb2
from pdserve.v1.errors import PdserveError
from router.fleet.worker import Worker
from router.fleet.worker_info import SequenceKey
from router.inbox import Inbox
from router.request import Request

ReserveCall = asyncio.Task[worker_pb2.ReserveResponse | PdserveError]


@dataclass(frozen=True, slots=True)
class Hold:
    """A worker that has, or may have, a reservation or a sequence of this attempt."""

    worker: Worker
    key: SequenceKey
    inbox: Inbox
    # Never cancelled: a Release must not overtake the Reserve that it undoes.
    reserving: ReserveCall


@dataclass(slots=True)
class Attempt:
    request: Request
    key: SequenceKey = field(init=False)
    known_token_ids: tuple[int, ...] = field(init=False)
    inbox: Inbox = field(init=False)
    prefill_worker: Worker | None = None
    decode_worker: Worker | None = None
    reservation: worker_pb2.Reservation | None = None
    prefill_task: asyncio.Task[None] | None = None
    holds: list[Hold] = field(default_factory=list)
    is_decode_begun: bool = False

    def __post_init__(self) -> None:
        request = self.request
        request.num_attempts += 1
        self.key = SequenceKey(request.plan.transfer_id, request.num_attempts)
        self.known_token_ids = tuple(request.transcript.token_ids)
        self.inbox = Inbox(len(self.known_token_ids))

    @property
    def num_tokens(self) -> int:
        """To be prefilled."""
        return len(self.request.plan.prompt_token_ids) + len(self.known_token_ids)

    @property
    def metadata(self) -> Metadata:
        """For its calls to workers: whose it is."""
        return self.request.trace.origin(self.request.plan.request_id).metadata()

    def phase(self, name: str) -> AbstractContextManager[Span]:
        ids: Attributes = {"pdserve.transfer_id": self.key.transfer_id, "pdserve.epoch": self.key.epoch}
        return self.request.trace.phase(name, ids)

    def spec(self) -> worker_pb2.SequenceSpec:
        return self.request.spec(self.key.epoch, self.known_token_ids)
