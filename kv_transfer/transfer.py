"""P's side of a hand-over: one sequence's blocks on their way to one reservation.

    OPEN ──D's ack──▶ SENDING ──Commit sent──▶ COMMITTED ──D's ack──▶ ACKED
      └─────────────────┴── token 0 ended it ──▶ NOT_NEEDED
    any of the first three ──▶ FAILED

The source blocks are pinned by the engine's hold until `done` is resolved: that is ACKED, NOT_NEEDED or
FAILED *and* the sending thread has let go of them. `done` gives the report (None for NOT_NEEDED), or
raises the PdserveError for which it failed.

`offer`, `offer_layers`, `commit`, `not_needed` and `abort` never block; they may be called from any thread.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from engine.errors import IntegrityError
from engine.request import NewToken
from kv_transfer.frame import TransferKey
from kv_transfer.progress import Progress
from kv_transfer.verify import Digest
from kv_transfer.ways import Way
from pdserve.v1.errors import Internal, PdserveError


class TransferState(Enum):
    OPEN = auto()
    SENDING = auto()
    COMMITTED = auto()
    ACKED = auto()
    NOT_NEEDED = auto()
    FAILED = auto()


_S = TransferState
LEGAL_MOVES: dict[TransferState, frozenset[TransferState]] = {
    _S.OPEN: frozenset({_S.SENDING, _S.NOT_NEEDED, _S.FAILED}),
    _S.SENDING: frozenset({_S.COMMITTED, _S.NOT_NEEDED, _S.FAILED}),
    _S.COMMITTED: frozenset({_S.ACKED, _S.FAILED}),
    _S.ACKED: frozenset(),
    _S.NOT_NEEDED: frozenset(),
    _S.FAILED: frozenset(),
}
ENDED = frozenset({_S.ACKED, _S.NOT_NEEDED, _S.FAILED})


@dataclass(frozen=True, slots=True)
class PushTarget:
    """A reservation as the router hands it to P."""

    key: TransferKey
    instance_id: str
    # Best first; at least one.
    ways: tuple[Way, ...]
    num_cached_blocks: int
    num_blocks: int
    lease_s: float


@dataclass(frozen=True, slots=True)
class TransferReport:
    transfer_ms: float  # first block pushed → commit acknowledged
    transfer_bytes: int
    num_blocks: int  # shipped
    # Of the bytes: what D had acknowledged when the first token was drawn.
    hidden_bytes: int


class TransferControl(Protocol):
    """What a transfer's owner may ask of whoever sends it (`Outbound`)."""

    def offer(self, transfer: Transfer, block_ids: tuple[int, ...], num_ready_blocks: int) -> None: ...

    def offer_layers(
        self, transfer: Transfer, block_ids: tuple[int, ...], num_tokens: int, num_layers: int
    ) -> None: ...

    def commit(
        self, transfer: Transfer, block_ids: tuple[int, ...], num_tokens: int, first: NewToken
    ) -> None: ...

    def withdraw(self, transfer: Transfer, error: PdserveError | None) -> None: ...


class Transfer:
    """The owner's handle, and the sender's record (its fields are the sender's, under the sender's lock)."""

    def __init__(self, target: PushTarget, num_layers: int, control: TransferControl) -> None:
        self.target = target
        self.done: Future[TransferReport | None] = Future()
        self.state = TransferState.OPEN
        self.error: PdserveError | None = None
        self.block_ids: tuple[int, ...] = ()
        self.progress = Progress(target.num_blocks, target.num_cached_blocks, num_layers)
        # Tokens whose KV the blocks will hold, once that is told.
        self.num_tokens: int | None = None
        # Set by `commit`.
        self.first: NewToken | None = None
        self.sampled_at_unix_ns = 0
        # D's blocks that a remote writer writes: those that are not cached there.
        self.remote_block_ids: tuple[int, ...] = ()
        self.is_open_sent = False
        self.next_seq = 0
        # Frames on their way that are not answered, and those of them that have a payload.
        self.num_unanswered = 0
        self.num_payloads_unanswered = 0
        # Its outcome was told, or is being told.
        self.is_settled = False
        self.digest = Digest()
        self.bytes_sent = 0
        self.bytes_acknowledged = 0
        self.hidden_bytes = 0
        self.begun_at: float | None = None
        self.last_sent_at = 0.0
        self._control = control

    @property
    def key(self) -> TransferKey:
        return self.target.key

    @property
    def is_ended(self) -> bool:
        return self.state in ENDED

    @property
    def renew_at(self) -> float:
        """When D's lease wants a sign of life, if nothing else was sent."""
        return self.last_sent_at + self.target.lease_s / 3

    def move(self, to: TransferState) -> None:
        if to not in LEGAL_MOVES[self.state]:
            raise IntegrityError(f"transfer {self.key}: {self.state.name} → {to.name}")
        self.state = to

    def offer(self, block_ids: tuple[int, ...], num_ready_blocks: int) -> None:
        """Blocks [0, num_ready_blocks) of the sequence are final and may leave."""
        self._control.offer(self, block_ids, num_ready_blocks)

    def offer_layers(self, block_ids: tuple[int, ...], num_tokens: int, num_layers: int) -> None:
        """Layers [0, num_layers) of all blocks are final; `num_tokens` is what they hold."""
        self._control.offer_layers(self, block_ids, num_tokens, num_layers)

    def commit(self, block_ids: tuple[int, ...], num_tokens: int, first: NewToken) -> None:
        """All blocks are final; the last one may be written in part. `first` was drawn just now."""
        self._control.commit(self, block_ids, num_tokens, first)

    def not_needed(self) -> None:
        """The first token ended the sequence: D's reservation is given back, nothing more is shipped."""
        self._control.withdraw(self, None)

    def abort(self, error: PdserveError) -> None:
        """Idempotent, and without effect on a transfer that has ended."""
        self._control.withdraw(self, error)

    def resolve(self) -> None:
        """The sender's, once, when the transfer has ended and nobody reads its blocks. Not under a lock:
        the owner's callbacks run here."""
        if self.state is TransferState.FAILED:
            self.done.set_exception(self.error or Internal(f"transfer {self.key} failed"))
        elif self.state is TransferState.NOT_NEEDED:
            self.done.set_result(None)
        else:
            now = time.monotonic()
            elapsed_ms = (now - (self.begun_at or now)) * 1000
            shipped = self.target.num_blocks - self.target.num_cached_blocks
            self.done.set_result(TransferReport(elapsed_ms, self.bytes_sent, shipped, self.hidden_bytes))
