"""P's one connection to one D, and the thread that feeds it with the frames of all transfers to there."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.errors import IntegrityError
from engine.request import NewToken
from kv_transfer.blocks import BlockStore, written_part
from kv_transfer.frame import (
    MAX_FRAME_BYTES,
    Abort,
    Ack,
    Blocks,
    Buffer,
    Closed,
    Commit,
    FrameError,
    Header,
    Open,
    Refused,
    Renew,
    TransferKey,
    checksum,
    decode,
)
from kv_transfer.layout import KVLayout
from kv_transfer.transfer import PushTarget, Transfer, TransferState
from kv_transfer.transport.base import Connection, Transport
from kv_transfer.window import Window
from pdserve.v1.errors import FailedPrecondition, PdserveError, Unavailable, from_code

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SenderConfig:
    # Payload of a frame: whole blocks, at least one, and at most MAX_FRAME_BYTES.
    frame_bytes: int = 2 * 1024 * 1024
    # What may be on its way unanswered.
    window_bytes: int = 16 * 1024 * 1024
    # A peer that answers nothing for so long is lost.
    ack_timeout_s: float = 10.0


@dataclass(frozen=True, slots=True)
class _Outgoing:
    transfer: Transfer | None
    header: Header
    payload: Sequence[Buffer] = ()


class Outbound:
    """Thread-safe. `on_end` is called once, from the feeding thread: no further transfer can go here."""

    def __init__(
        self,
        address: str,
        transport: Transport,
        layout: KVLayout,
        blocks: BlockStore,
        config: SenderConfig,
        on_end: Callable[[Outbound], None],
    ) -> None:
        self.address = address
        self.bytes_sent = 0
        self._transport = transport
        self._layout = layout
        self._blocks = blocks
        self._config = config
        self._on_end = on_end
        self._wake = threading.Condition()
        # Living transfers; the one that sent last is at the end.
        self._transfers: OrderedDict[TransferKey, Transfer] = OrderedDict()
        self._farewells: deque[Open | Abort | Closed] = deque()
        self._window = Window(config.window_bytes)
        # The transfer whose blocks the thread is reading right now: its pins stay until the thread is done.
        self._being_read: Transfer | None = None
        self._connection: Connection | None = None
        self._error: PdserveError | None = None
        self._thread = threading.Thread(target=self._run, name=f"kv-to-{address}", daemon=True)
        self._thread.start()

    @property
    def is_lost(self) -> bool:
        return self._error is not None

    @property
    def num_transfers(self) -> int:
        with self._wake:
            return len(self._transfers) + (self._being_read is not None and self._being_read.is_ended)

    def open(self, target: PushTarget) -> Transfer:
        transfer = Transfer(target, self)
        with self._wake:
            error = self._error
            if error is None:
                if target.key in self._transfers:
                    raise FailedPrecondition(f"{target.key} is open already", reason="TRANSFER_OPEN")
                self._transfers[target.key] = transfer
                self._wake.notify_all()
        if error is not None:
            self.withdraw(transfer, error)
        return transfer

    def close(self, error: PdserveError) -> None:
        """Fails what is still living. `join` waits for the thread."""
        self.on_lost(error)
        connection = self._connection
        if connection is not None:
            connection.close()

    def join(self) -> None:
        self._thread.join()

    # -- TransferControl ---------------------------------------------------------------------------

    def offer(self, transfer: Transfer, block_ids: tuple[int, ...], num_ready_blocks: int) -> None:
        with self._wake:
            if not transfer.is_ended and num_ready_blocks > transfer.num_ready_blocks:
                transfer.block_ids = block_ids
                transfer.num_ready_blocks = min(num_ready_blocks, transfer.target.num_blocks)
                self._wake.notify_all()

    def commit(
        self, transfer: Transfer, block_ids: tuple[int, ...], num_tokens: int, first: NewToken
    ) -> None:
        expected = transfer.target.num_blocks
        if len(block_ids) < expected or self._layout.num_blocks_for(num_tokens) != expected:
            message = f"{transfer.key}: {expected} blocks are reserved for {num_tokens} tokens"
            self.withdraw(transfer, FailedPrecondition(message, reason="WRONG_BLOCKS"))
            return
        with self._wake:
            if not transfer.is_ended:
                transfer.block_ids = block_ids
                transfer.num_ready_blocks = expected
                transfer.num_tokens = num_tokens
                transfer.first = first
                self._wake.notify_all()

    def withdraw(self, transfer: Transfer, error: PdserveError | None) -> None:
        with self._wake:
            if transfer.is_ended:
                return
            if not transfer.is_open_sent:  # D knows P only from an Open, and takes an Abort from nobody else
                self._farewells.append(self._open_frame(transfer))
                transfer.is_open_sent = True
            if self._error is None:
                reason = "the first token ended the sequence" if error is None else error.message
                self._farewells.append(Abort(transfer.key, reason))
            to = TransferState.NOT_NEEDED if error is None else TransferState.FAILED
            is_free = self._end(transfer, to, error)
        if is_free:
            transfer.resolve()

    # -- ConnectionEvents --------------------------------------------------------------------------

    def on_reply(self, raw: bytes) -> None:
        try:
            header, _ = decode(raw)
            if not isinstance(header, Ack | Refused):
                raise FrameError(f"{type(header).__name__} came from the wrong side")
        except FrameError as error:
            self.on_lost(Unavailable(f"no answer but garbage: {error}", reason="KV_STREAM_BROKEN"))
            return
        with self._wake:
            transfer = self._window.answered(header.key, header.seq)
            is_free = transfer is not None and self._answered(transfer, header)
            self._wake.notify_all()
        if transfer is not None and is_free:
            transfer.resolve()

    def on_lost(self, error: PdserveError) -> None:
        with self._wake:
            if self._error is None:
                log.info("no more KV to %s: %s", self.address, error.message)
                self._error = error
            self._wake.notify_all()

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._connection = connection = self._transport.connect(self.address, self)
            while (outgoing := self._next()) is not None:
                loaded = self._load(outgoing)
                connection.send(loaded.header, loaded.payload)
                self._sent(loaded)
        except PdserveError as error:
            self.on_lost(error)
        finally:
            self._finish()

    def _next(self) -> _Outgoing | None:
        """What to send now; waits for it. None: the way is lost. Raises Unavailable if the peer is silent."""
        with self._wake:
            while self._error is None:
                now = time.monotonic()
                self._require_answers(now)
                if self._farewells:
                    return _Outgoing(None, self._farewells.popleft())
                for transfer in self._transfers.values():
                    header = self._due(transfer, now)
                    if header is not None:
                        self._note(transfer, header, now)
                        return _Outgoing(transfer, header)
                self._wake.wait(self._patience_s(now))
            return None

    def _due(self, transfer: Transfer, now: float) -> Open | Blocks | Commit | Renew | None:
        key, seq, target = transfer.key, transfer.next_seq, transfer.target
        if not transfer.is_open_sent:
            return self._open_frame(transfer)
        if transfer.state is TransferState.SENDING:
            num_blocks = self._num_blocks_to_send(transfer)
            if num_blocks > 0:
                return Blocks(key, seq, transfer.next_block, num_blocks, checksum=0)
            if transfer.first is not None and transfer.next_block == target.num_blocks:
                return Commit(key, seq, target.num_blocks, transfer.digest.value(), transfer.first)
        if transfer.num_unanswered == 0 and now >= transfer.renew_at:
            return Renew(key, seq - 1)
        return None

    def _open_frame(self, transfer: Transfer) -> Open:
        target = transfer.target
        shape = (target.num_blocks, target.num_cached_blocks)
        return Open(transfer.key, target.instance_id, target.transport, self._layout, *shape)

    def _num_blocks_to_send(self, transfer: Transfer) -> int:
        size = self._blocks.block_bytes
        ready = transfer.num_ready_blocks - transfer.next_block
        room = self._window.room_bytes(at_least=size) // size
        return min(ready, room, max(1, min(self._config.frame_bytes, MAX_FRAME_BYTES) // size))

    def _note(self, transfer: Transfer, header: Open | Blocks | Commit | Renew, now: float) -> None:
        """Before sending: the answer may come before `send` returns."""
        num_bytes = 0
        if isinstance(header, Blocks):
            num_bytes = header.num_blocks * self._blocks.block_bytes
            transfer.next_block += header.num_blocks
            self._being_read = transfer
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

    def _load(self, outgoing: _Outgoing) -> _Outgoing:
        """Without the lock: a Blocks frame gets its bytes and its checksum."""
        header, transfer = outgoing.header, outgoing.transfer
        if transfer is None or not isinstance(header, Blocks):
            return outgoing
        payload = self._read(transfer, header.first_block, header.first_block + header.num_blocks)
        sealed = replace(header, checksum=checksum(payload))
        transfer.digest.add(sealed.checksum)
        return _Outgoing(transfer, sealed, payload)

    def _read(self, transfer: Transfer, first: int, end: int) -> list[memoryview]:
        payload = [self._blocks.read(block_id) for block_id in transfer.block_ids[first:end]]
        num_blocks, size = transfer.target.num_blocks, self._layout.block_size
        if transfer.num_tokens is not None and end == num_blocks and transfer.num_tokens % size:
            payload[-1] = written_part(self._layout, payload[-1], transfer.num_tokens % size)
        return payload

    def _sent(self, outgoing: _Outgoing) -> None:
        transfer = outgoing.transfer
        if transfer is None or not outgoing.payload:
            return
        num_bytes = len(outgoing.payload) * self._blocks.block_bytes
        with self._wake:
            self.bytes_sent += num_bytes
            transfer.bytes_sent += num_bytes
            self._being_read = None
            is_over = transfer.is_ended
        if is_over:
            transfer.resolve()

    def _finish(self) -> None:
        if self._connection is not None:
            self._connection.close()
        with self._wake:
            self._error = self._error or Unavailable("the sending thread ended", reason="KV_STREAM_BROKEN")
            last_read, self._being_read = self._being_read, None
            over = list(self._transfers.values())
            for transfer in over:
                self._end(transfer, TransferState.FAILED, self._error)
        if last_read is not None and last_read not in over:
            over.append(last_read)
        for transfer in over:
            transfer.resolve()
        self._on_end(self)

    # -- under the lock ----------------------------------------------------------------------------

    def _answered(self, transfer: Transfer, header: Ack | Refused) -> bool:
        """Whether the transfer is over and its blocks are free."""
        if isinstance(header, Refused):
            error = from_code(header.code, header.message)
            error.reason = header.reason
            return self._end(transfer, TransferState.FAILED, error)
        if transfer.state is TransferState.OPEN:
            transfer.move(TransferState.SENDING)
        elif transfer.state is TransferState.COMMITTED and header.seq == transfer.next_seq - 1:
            return self._end(transfer, TransferState.ACKED, None)
        return False

    def _end(self, transfer: Transfer, to: TransferState, error: PdserveError | None) -> bool:
        """Whether its blocks are free: else the thread is reading them, and resolves the transfer itself."""
        transfer.move(to)
        transfer.error = error
        if transfer.is_open_sent and to is not TransferState.ACKED:
            self._farewells.append(Closed(transfer.key))
        self._transfers.pop(transfer.key, None)
        self._window.forget(transfer)
        self._wake.notify_all()
        return self._being_read is not transfer

    def _require_answers(self, now: float) -> None:
        oldest = self._window.oldest_sent_at()
        if oldest is not None and now - oldest >= self._config.ack_timeout_s:
            silence = f"the decode worker at {self.address} answers nothing"
            raise Unavailable(f"{silence} for {self._config.ack_timeout_s} s", reason="KV_ACK_TIMEOUT")

    def _patience_s(self, now: float) -> float | None:
        times = [t.renew_at for t in self._transfers.values() if t.num_unanswered == 0]
        oldest = self._window.oldest_sent_at()
        if oldest is not None:
            times.append(oldest + self._config.ack_timeout_s)
        return max(0.0, min(times) - now) if times else None

    def check_integrity(self) -> None:
        with self._wake:
            self._window.check_integrity()
            if any(t.is_ended for t in self._transfers.values()):
                raise IntegrityError(f"a transfer to {self.address} ended and is still listed")
