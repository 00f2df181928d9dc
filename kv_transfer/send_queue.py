"""What one D is to be sent, in which order, and what of it is not answered yet. Bookkeeping only: no
threads, no bytes, no transport; the caller's lock guards it."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from engine.errors import IntegrityError
from kv_transfer.frame import (
    MAX_FRAME_BYTES,
    Abort,
    Ack,
    Blocks,
    Closed,
    Commit,
    Open,
    Refused,
    Renew,
    TransferKey,
)
from kv_transfer.layout import KVLayout
from kv_transfer.transfer import Transfer, TransferState
from kv_transfer.window import Window
from pdserve.v1.errors import FailedPrecondition, PdserveError, from_code


@dataclass(frozen=True, slots=True)
class SenderConfig:
    # Payload of a frame: whole blocks, at least one, and at most MAX_FRAME_BYTES.
    frame_bytes: int = 2 * 1024 * 1024
    # What may be on its way unanswered.
    window_bytes: int = 16 * 1024 * 1024
    # A peer that answers nothing for so long is lost.
    ack_timeout_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Due:
    """A frame to send now. `transfer`: whose blocks it ships or whose state it moves; None for a farewell."""

    header: Open | Blocks | Commit | Renew | Abort | Closed
    transfer: Transfer | None


class SendQueue:
    """Farewells go first; transfers take turns, a frame each."""

    def __init__(self, layout: KVLayout, config: SenderConfig) -> None:
        self._layout = layout
        self._config = config
        # Living transfers; the one that sent last is at the end.
        self._transfers: OrderedDict[TransferKey, Transfer] = OrderedDict()
        self._farewells: deque[Open | Abort | Closed] = deque()
        self._window = Window(config.window_bytes)

    def __len__(self) -> int:
        return len(self._transfers)

    def add(self, transfer: Transfer) -> None:
        if transfer.key in self._transfers:
            raise FailedPrecondition(f"{transfer.key} is open already", reason="TRANSFER_OPEN")
        self._transfers[transfer.key] = transfer

    def next(self, now: float) -> Due | None:
        """The frame that is due, noted as sent: its answer may come before the sending call returns."""
        if self._farewells:
            return Due(self._farewells.popleft(), None)
        for transfer in self._transfers.values():
            header = self._due(transfer, now)
            if header is not None:
                self._note(transfer, header, now)
                return Due(header, transfer)
        return None

    def patience_s(self, now: float) -> float | None:
        """Until a sign of life is due, or the peer was silent for too long. None: nothing to wait for."""
        times = [t.renew_at for t in self._transfers.values() if t.num_unanswered == 0]
        oldest = self._window.oldest_sent_at()
        if oldest is not None:
            times.append(oldest + self._config.ack_timeout_s)
        return max(0.0, min(times) - now) if times else None

    def is_peer_silent(self, now: float) -> bool:
        oldest = self._window.oldest_sent_at()
        return oldest is not None and now - oldest >= self._config.ack_timeout_s

    def withdraw(self, transfer: Transfer, error: PdserveError | None) -> None:
        """P takes a living transfer back: for `error`, or because its first token ended the sequence."""
        if not transfer.is_open_sent:  # D knows P only from an Open, and takes an Abort from nobody else
            self._farewells.append(self._open(transfer))
            transfer.is_open_sent = True
        reason = "the first token ended the sequence" if error is None else error.message
        self._farewells.append(Abort(transfer.key, reason))
        self._end(transfer, TransferState.NOT_NEEDED if error is None else TransferState.FAILED, error)

    def answered(self, header: Ack | Refused) -> Transfer | None:
        """The transfer that this answer has ended, if it has."""
        transfer = self._window.answered(header.key, header.seq)
        if transfer is None:
            return None  # the answer to a duplicate, or for a transfer that has ended here
        if isinstance(header, Refused):
            error = from_code(header.code, header.message)
            error.reason = header.reason
            self._end(transfer, TransferState.FAILED, error)
            return transfer
        if transfer.state is TransferState.OPEN:
            transfer.move(TransferState.SENDING)
        elif transfer.state is TransferState.COMMITTED and header.seq == transfer.next_seq - 1:
            self._end(transfer, TransferState.ACKED, None)
            return transfer
        return None

    def fail_all(self, error: PdserveError) -> list[Transfer]:
        living = list(self._transfers.values())
        for transfer in living:
            self._end(transfer, TransferState.FAILED, error)
        return living

    def check_integrity(self) -> None:
        self._window.check_integrity()
        if any(transfer.is_ended for transfer in self._transfers.values()):
            raise IntegrityError("a transfer has ended and is still listed")

    def _due(self, transfer: Transfer, now: float) -> Open | Blocks | Commit | Renew | None:
        key, seq, num_total = transfer.key, transfer.next_seq, transfer.target.num_blocks
        if not transfer.is_open_sent:
            return self._open(transfer)
        if transfer.state is TransferState.SENDING:
            num_blocks = self._num_blocks_to_send(transfer)
            if num_blocks > 0:
                return Blocks(key, seq, transfer.next_block, num_blocks, checksum=0)
            if transfer.first is not None and transfer.next_block == num_total:
                return Commit(key, seq, num_total, transfer.digest.value(), transfer.first)
        if transfer.num_unanswered == 0 and now >= transfer.renew_at:
            return Renew(key, seq - 1)
        return None

    def _open(self, transfer: Transfer) -> Open:
        target = transfer.target
        shape = (target.num_blocks, target.num_cached_blocks)
        return Open(transfer.key, target.instance_id, target.transport, self._layout, *shape)

    def _num_blocks_to_send(self, transfer: Transfer) -> int:
        size = self._layout.block_bytes
        ready = transfer.num_ready_blocks - transfer.next_block
        room = self._window.room_bytes(at_least=size) // size
        return min(ready, room, max(1, min(self._config.frame_bytes, MAX_FRAME_BYTES) // size))

    def _note(self, transfer: Transfer, header: Open | Blocks | Commit | Renew, now: float) -> None:
        num_bytes = 0
        if isinstance(header, Blocks):
            num_bytes = header.num_blocks * self._layout.block_bytes
            transfer.next_block += header.num_blocks
        elif isinstance(header, Commit):
            transfer.move(TransferState.COMMITTED)
        if isinstance(header, Blocks | Commit) and transfer.begun_at is None:
            transfer.begun_at = now
        if not isinstance(header, Renew):
            transfer.next_seq += 1
        transfer.is_open_sent = True
        transfer.last_sent_at = now
        self._window.add(transfer, header.seq, num_bytes, now)
        self._transfers.move_to_end(transfer.key)

    def _end(self, transfer: Transfer, to: TransferState, error: PdserveError | None) -> None:
        transfer.move(to)
        transfer.error = error
        if transfer.is_open_sent and to is not TransferState.ACKED:
            self._farewells.append(Closed(transfer.key))
        self._transfers.pop(transfer.key, None)
        self._window.forget(transfer)
