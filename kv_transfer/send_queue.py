"""What one D is to be sent, in which order, and what of it is not answered yet. Bookkeeping only: no
threads, no bytes, no transport; the caller's lock guards it."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from engine.errors import IntegrityError
from engine.request import NewToken
from kv_transfer.frame import (
    MAX_APART_BYTES,
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
from kv_transfer.verify import Verify
from kv_transfer.window import Window
from pdserve.v1.errors import FailedPrecondition, Internal, PdserveError, from_code


@dataclass(frozen=True, slots=True)
class SenderConfig:
    # Payload of a frame: pieces of blocks, at least one, and at most MAX_FRAME_BYTES. None: what is best
    # for the transport, by `benchmarks/`.
    frame_bytes: int | None = None
    # What may be on its way unanswered. None: eight frames.
    window_bytes: int | None = None
    # Connections to one D, each with a thread, while transfers are many: a transfer keeps to one.
    num_channels: int = 1
    # How much of it D is to check; None for what is usual on the transport.
    verify: Verify | None = None
    # A peer that answers nothing for so long is lost.
    ack_timeout_s: float = 10.0
    # For how long a way that broke is not used, the first time; the peer is reached by another.
    broken_way_pause_s: float = 60.0


_IN_FRAME_BYTES = 2 * 1024 * 1024
# Where bytes go apart from their frame, what a frame itself costs is a larger part.
_APART_BYTES = 8 * 1024 * 1024


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
        self._window = Window(0)
        self.connected("", is_remote_writer=False, is_apart=False, usual_verify=Verify.CHECKSUM)

    def __len__(self) -> int:
        return len(self._transfers)

    def connected(
        self, transport: str, *, is_remote_writer: bool, is_apart: bool, usual_verify: Verify
    ) -> None:
        """Before the first `next`. `is_apart`: payloads do not travel in their frames."""
        self._transport = transport
        self._is_remote_writer = is_remote_writer
        self.verify = usual_verify if self._config.verify is None else self._config.verify
        chosen = self._config.frame_bytes or (_APART_BYTES if is_apart else _IN_FRAME_BYTES)
        self._frame_bytes = min(chosen, MAX_APART_BYTES if is_apart else MAX_FRAME_BYTES)
        self._window.max_bytes = self._config.window_bytes or 8 * self._frame_bytes

    def add(self, transfer: Transfer) -> None:
        if transfer.key in self._transfers or transfer.key in self._window:
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
        silent_since = self._window.silent_since()
        if silent_since is not None:
            times.append(silent_since + self._config.ack_timeout_s)
        return max(0.0, min(times) - now) if times else None

    def is_peer_silent(self, now: float) -> bool:
        silent_since = self._window.silent_since()
        return silent_since is not None and now - silent_since >= self._config.ack_timeout_s

    def withdraw(self, transfer: Transfer, error: PdserveError | None) -> None:
        """P takes a living transfer back: for `error`, or because its first token ended the sequence."""
        if not transfer.is_open_sent:
            self._farewells.append(transfer)
            transfer.is_open_sent = True
        reason = "the first token ended the sequence" if error is None else error.message
        self._farewells.append(Abort(transfer.key, reason))
        self._end(transfer, TransferState.NOT_NEEDED if error is None else TransferState.FAILED, error)

    def answered(self, header: Ack | Refused, now: float) -> Transfer | None:
        """The transfer that this answer is for; None for the answer to a duplicate."""
        transfer = self._window.answered(header.key, header.seq, now)
        if transfer is not None and not transfer.is_ended:
            self._apply(transfer, header)
        return transfer

    def _apply(self, transfer: Transfer, header: Ack | Refused) -> None:
        if isinstance(header, Refused):
            error = from_code(header.code, header.message)
            error.reason = header.reason
            self._end(transfer, TransferState.FAILED, error)
        elif transfer.state is TransferState.OPEN:
            transfer.move(TransferState.SENDING)
            transfer.remote_block_ids = header.block_ids
            target = transfer.target
            if (
                self._is_remote_writer
                and len(header.block_ids) != target.num_blocks - target.num_cached_blocks
            ):
                error = Internal(f"{transfer.key}: other blocks are reserved there", reason="WRONG_BLOCKS")
                self._end(transfer, TransferState.FAILED, error)
        elif transfer.state is TransferState.COMMITTED and header.seq == transfer.next_seq - 1:
            self._end(transfer, TransferState.ACKED, None)

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
        frame_bytes = max(smallest, self._frame_bytes)
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
