"""One attempt at a sequence that this worker has let in: reserved, receiving or running."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import Enum

from decode_worker.record import DecodeRecord
from engine.request import SequenceRequest
from engine.sampling import FinishReason
from kv_transfer.frame import TransferKey
from kv_transfer.transfer import PushTarget
from pdserve.v1.errors import PdserveError


class Mode(Enum):
    RECEIVE_KV = "receive_kv"
    PREFILL_HERE = "prefill_here"


class Released(Enum):
    """How a sequence leaves that ends neither by itself nor by an error."""

    BY_ROUTER = "by_router"  # its client has left, or has all it wanted
    BY_SENDER = "by_sender"  # P took its transfer back: token 0 ended it, or P failed


@dataclass(eq=False, slots=True)
class Admission:
    """`granted` answers every Reserve for this key: where to push, or None for a prompt that runs here."""

    key: TransferKey
    router_id: str
    request: SequenceRequest
    mode: Mode
    granted: asyncio.Future[PushTarget | None]
    record: DecodeRecord

    def grant(self, target: PushTarget | None) -> None:
        self.record.reserved(target)
        if not self.granted.done():
            self.granted.set_result(target)

    def refuse(self, error: Exception) -> None:
        if not self.granted.done():
            self.granted.set_exception(error)
            self.granted.exception()  # it is no loss if nobody waits for it


class Admissions:
    """The living ones. Used on the asyncio loop only."""

    def __init__(self) -> None:
        self._by_sequence: dict[str, Admission] = {}
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def __len__(self) -> int:
        return len(self._by_sequence)

    def all(self) -> list[Admission]:
        return list(self._by_sequence.values())

    def get(self, sequence_id: str) -> Admission | None:
        return self._by_sequence.get(sequence_id)

    def older_epochs(self, key: TransferKey) -> list[Admission]:
        return [a for a in self.all() if a.key.transfer_id == key.transfer_id and a.key.epoch < key.epoch]

    def of_router(self, router_id: str) -> list[Admission]:
        return [a for a in self.all() if a.router_id == router_id]

    def add(self, admission: Admission) -> None:
        self._by_sequence[admission.request.sequence_id] = admission
        self._is_empty.clear()

    def remove(self, admission: Admission, outcome: FinishReason | PdserveError | Released) -> bool:
        """Idempotent; False if it was gone."""
        was_there = self._by_sequence.get(admission.request.sequence_id) is admission
        if was_there:
            del self._by_sequence[admission.request.sequence_id]
            if isinstance(outcome, PdserveError):
                admission.record.ended(outcome.label, is_error=True)
            else:
                admission.record.ended(outcome.name, is_error=False)
        if not self._by_sequence:
            self._is_empty.set()
        return was_there

    async def wait_until_empty(self) -> None:
        await self._is_empty.wait()
