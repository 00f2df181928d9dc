"""What one D is to be sent, in which order, and what of it is not answered yet. Bookkeeping only: no
threads, no bytes, no transport; the caller's lock guards it."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from engine.errors import IntegrityError
from engine.request import NewToken
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
from kv_transfer.progress import Progress, Span
from kv_transfer.transfer import Transfer, TransferState
from kv_transfer.verify import Verify, default_verify
from kv_transfer.window import Window
from pdserve.v1.errors import FailedPrecondition, Internal, PdserveError, from_code


@dataclass(frozen=True, slots=True)
class SenderConfig:
    # Payload of a frame: pieces of blocks, at least one, and at most MAX_FRAME_BYTES.
    frame_bytes: int = 2 * 1024 * 1024
    # What may be on its way unanswered.
    window_bytes: int = 16 * 1024 * 1024
    # How much of it D is to check; None for what is usual on the transport.
    verify: Verify | None = None
    # A peer that answers nothing for so long is lost.
    ack_timeout_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Due:
    """A frame to send now. `transfer`: whose blocks it ships or whose state it moves; None for a farewell."""

    header: Open | Blocks | Commit | Renew | Abort | Closed
    transfer: Transfer | None = None


class SendQueue:
    """Farewells go first; transfers take turns, a frame each."""

    def __init__(self, layout: KVLayout, config: SenderConfig) -> None:
        self._layout = layout
        self._config = config
        # Living transfers; the one that sent last is at the end.
        self._transfers: OrderedDict[TransferKey, Transfer] = OrderedDict()
        # A transfer: its Open, without which D would take no Abort from us.
        self._farewells: deque[Transfer | Abort | Closed] = deque()
        self._window = Window(config.window_bytes)
        self._transport = ""
        self._is_remote_writer = False

    def __len__(self) -> int:
        return len(self._transfers)

    def connected(self, transport: str, is_remote_writer: bool) -> None:
        """Before the first `next`."""
        self._transport = transport
        self._is_remote_writer = is_remote_writer

    @property
    def verify(self) -> Verify:
        chosen = self._config.verify
        return default_verify(self._is_remote_writer) if chosen is None else chosen

    def add(self, transfer: Transfer) -> None:
        if transfer.key in self._transfers:
            raise FailedPrecondition(f"{transfer.key} is open already", reason="TRANSFER_OPEN")
        self._transfers[transfer.key] = transfer

    def next(self, now: float) -> Due | None:
        """The frame that is due, noted as sent: its answer may come before the sending call returns."""
        if self._farewells:
            last = self._farewells.popleft()
            return Due(self._open(last) if isinstance(last, Transfer) else last)
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
        if not transfer.is_open_sent:
            self._farewells.append(transfer)
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
            transfer.remote_block_ids = header.block_ids
            target = transfer.target
            if (
                self._is_remote_writer
                and len(header.block_ids) != target.num_blocks - target.num_cached_blocks
            ):
                error = Internal(f"{transfer.key}: other blocks are reserved there", reason="WRONG_BLOCKS")
                self._end(transfer, TransferState.FAILED, error)
                return transfer
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
        key, seq = transfer.key, transfer.next_seq
        if not transfer.is_open_sent:
            return self._open(transfer)
        if transfer.state is TransferState.SENDING:
            span = self._span(transfer.progress)
            if span is not None:
                blocks, layers = span.blocks, span.layers
                shape = (blocks.start, len(blocks), layers.start, len(layers))
                return Blocks(key, seq, *shape, checksum=0)
            if transfer.first is not None and transfer.progress.is_complete:
                return self._commit(transfer, transfer.first)
        if transfer.num_unanswered == 0 and now >= transfer.renew_at:
            return Renew(key, seq - 1)
        return None

    def _open(self, transfer: Transfer) -> Open:
        target = transfer.target
        shape = (target.num_blocks, target.num_cached_blocks)
        return Open(
            transfer.key,
            target.instance_id,
            self._transport,
            self._layout,
            *shape,
            self.verify,
            self._is_remote_writer,
        )

    def _commit(self, transfer: Transfer, first: NewToken) -> Commit:
        digest = transfer.digest.value() if self.verify > Verify.OFF else 0
        num_blocks = transfer.target.num_blocks
        return Commit(transfer.key, transfer.next_seq, num_blocks, digest, first, transfer.sampled_at_unix_ns)

    def _span(self, progress: Progress) -> Span | None:
        size = self._layout.layer_bytes
        smallest = progress.num_layers_due * size
        frame_bytes = max(smallest, min(self._config.frame_bytes, MAX_FRAME_BYTES))
        return progress.next(min(self._window.room_bytes(at_least=smallest), frame_bytes) // size)

    def _note(self, transfer: Transfer, header: Open | Blocks | Commit | Renew, now: float) -> None:
        num_bytes = 0
        if isinstance(header, Blocks):
            num_bytes = header.num_blocks * header.num_layers * self._layout.layer_bytes
            transfer.progress.note(Span(header.blocks, header.layers))
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
