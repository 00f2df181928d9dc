"""D's side of a hand-over: blocks that wait for KV, who may write them, and when they are free again.

    RESERVED ──Open──▶ RECEIVING ──Commit──▶ READY ──engine took it──▶ CONSUMED
        └───────────────┴──────────────────────┘
                 release, failure │ lease ran out
                    ABORTED ◀─────┴─────▶ EXPIRED
                        └──▶ QUARANTINED ◀──┘
                                 └──▶ FREED

A reservation is single-use. Its blocks go back only from QUARANTINED to FREED, with a proof that nobody
writes them any more. Where a thread of ours does the writing (grpc, memory), the proof is that the thread
has left `writing`. Where P's process writes by itself, its Commit is one (nothing is written behind it), its
Closed, and its proven death; a broken stream is none.

The lease is a duration. It runs anew from each frame that was accepted, and stops counting at READY: from
there on the router's Subscribe keeps the sequence.
"""

from __future__ import annotations

from enum import Enum, auto

from engine.errors import IntegrityError
from engine.request import NewToken
from engine.reservations import BlockReservation
from kv_transfer.coverage import Coverage
from kv_transfer.frame import Blocks, Commit, TransferKey
from kv_transfer.verify import Digest, Verify
from pdserve.v1.errors import Aborted, DataLoss, FailedPrecondition


class ReservationState(Enum):
    RESERVED = auto()
    RECEIVING = auto()
    READY = auto()
    CONSUMED = auto()
    ABORTED = auto()
    EXPIRED = auto()
    QUARANTINED = auto()
    FREED = auto()


_S = ReservationState
LEGAL_MOVES: dict[ReservationState, frozenset[ReservationState]] = {
    _S.RESERVED: frozenset({_S.RECEIVING, _S.ABORTED, _S.EXPIRED}),
    _S.RECEIVING: frozenset({_S.READY, _S.ABORTED, _S.EXPIRED}),
    _S.READY: frozenset({_S.CONSUMED, _S.ABORTED, _S.EXPIRED}),
    _S.CONSUMED: frozenset(),
    _S.ABORTED: frozenset({_S.QUARANTINED}),
    _S.EXPIRED: frozenset({_S.QUARANTINED}),
    _S.QUARANTINED: frozenset({_S.FREED}),
    _S.FREED: frozenset(),
}
HOLDS_A_LEASE = frozenset({_S.RESERVED, _S.RECEIVING})
CAN_STILL_END = frozenset({_S.RESERVED, _S.RECEIVING, _S.READY})


class Reservation:
    """One reservation. Only its table touches it, under the table's lock."""

    def __init__(
        self, key: TransferKey, blocks: BlockReservation, num_layers: int, lease_s: float, now: float
    ) -> None:
        self.key = key
        self.blocks = blocks
        self.state = ReservationState.RESERVED
        self.lease_s = lease_s
        self.expires_at = now + lease_s
        # The stream whose Open was accepted; no other may send for this key.
        self.stream: object | None = None
        self.next_seq = 0
        self.coverage = Coverage(len(blocks.block_ids), num_layers, blocks.num_cached_blocks)
        self.digest = Digest()
        self.first: NewToken | None = None
        # When P drew `first` and when all KV was here, by the clocks of their nodes.
        self.sampled_at_unix_ns = 0
        self.ready_at_unix_ns = 0
        # Frames whose writing has begun and not ended: they follow on `next_seq`.
        self.num_writers = 0
        # What its Open said, and when that was.
        self.transport = ""
        self.opened_at = 0.0
        self.verify = Verify.OFF
        self.is_remote = False
        # P's process writes by itself, and has said neither Commit nor Closed.
        self.has_remote_writer = False
        self.quarantined_at = now

    def move(self, to: ReservationState) -> None:
        if to not in LEGAL_MOVES[self.state]:
            raise IntegrityError(f"reservation {self.key}: {self.state.name} → {to.name}")
        self.state = to

    @property
    def num_blocks(self) -> int:
        return len(self.blocks.block_ids)

    @property
    def blocks_to_write(self) -> tuple[int, ...]:
        return self.blocks.block_ids[self.blocks.num_cached_blocks :]

    @property
    def is_written_by_nobody(self) -> bool:
        return self.num_writers == 0 and not self.has_remote_writer

    def admit(self, frame: Blocks) -> tuple[int, ...]:
        """The blocks that this frame is for, and that count as covered from now on: a frame that fails ends
        its reservation. Raises where it does not belong here now."""
        if self.state is not ReservationState.RECEIVING:
            raise Aborted(f"{self.key} takes no more blocks", reason="TRANSFER_ENDED")
        self._require_next(frame.seq - self.num_writers)
        if not self.coverage.is_due(frame):
            span = f"layers {frame.layers} of blocks {frame.blocks}"
            raise FailedPrecondition(f"{self.key}: {span} are not due", reason="WRONG_BLOCKS")
        self.coverage.add(frame)
        return self.blocks.block_ids[frame.blocks.start : frame.blocks.stop]

    def check(self, frame: Commit) -> None:
        """Every cell is there and, if that is checked, the digest is that of what was accepted. Raises."""
        if self.state is not ReservationState.RECEIVING:
            raise Aborted(f"{self.key} ended before its commit", reason="TRANSFER_ENDED")
        self._require_next(frame.seq)
        if self.num_writers:  # their cells count as covered already
            raise Aborted(f"{self.key}: its commit overtook its blocks", reason="FRAME_LOST")
        missing = self.coverage.num_missing
        if missing or self.num_blocks != frame.num_blocks:
            have = f"of {self.num_blocks} blocks {missing} layers are missing"
            raise DataLoss(f"{self.key}: commit of {frame.num_blocks}, {have}", reason="MISSING")
        if self.verify > Verify.OFF and frame.digest != self.digest.value():
            raise DataLoss(f"{self.key}: the digest of the KV is wrong", reason="KV_DIGEST")

    def _require_next(self, seq: int) -> None:
        if seq != self.next_seq:
            gap = f"frame {seq} came, {self.next_seq} was due"
            raise Aborted(f"{self.key}: {gap}", reason="FRAME_LOST")

    def renew(self, now: float) -> None:
        self.expires_at = now + self.lease_s
