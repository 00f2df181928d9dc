"""P's one connection to one D, and the thread that feeds it with the frames of all transfers to there."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from engine.request import NewToken
from kv_transfer.blocks import BlockStore, Cells
from kv_transfer.codec import FrameError, decode_answers
from kv_transfer.frame import Blocks
from kv_transfer.layout import KVLayout
from kv_transfer.send_queue import Due, SenderConfig, SendQueue
from kv_transfer.transfer import PushTarget, Transfer
from kv_transfer.transport.base import Connection, Transport
from kv_transfer.verify import Verify, checksum
from kv_transfer.ways import WAY_BROKEN, Way, WaySilent, WayUnusable
from pdserve.v1.errors import FailedPrecondition, PdserveError, Unavailable

log = logging.getLogger(__name__)


class Outbound:
    """Thread-safe. Both are called from the feeding thread: `on_end` once, when no further transfer can go
    here; `on_silent` with the name of a transport that is better left out for a while."""

    def __init__(
        self,
        ways: tuple[Way, ...],
        transports: Mapping[str, Transport],
        layout: KVLayout,
        blocks: BlockStore,
        config: SenderConfig,
        on_end: Callable[[Outbound], None],
        on_silent: Callable[[str], None],
    ) -> None:
        # Where it goes: the way that was taken, once that is known.
        self.way = ways[0]
        self.bytes_sent = 0
        # What it was to choose from, the best first.
        self.ways = ways
        self._transports = transports
        self._layout = layout
        self._blocks = blocks
        self._on_end = on_end
        self._on_silent = on_silent
        self._wake = threading.Condition()
        self._queue = SendQueue(layout, config)
        # The transfer whose blocks the thread is reading right now: its pins stay until the thread is done.
        self._being_read: Transfer | None = None
        # Whether the connection reads payloads until they are answered, and not in `send` only.
        self._reads_late = False
        # Those that have ended, and whose blocks are still being read.
        self._lingering: set[Transfer] = set()
        self._connection: Connection | None = None
        self._error: PdserveError | None = None
        self._thread = threading.Thread(target=self._run, name=f"kv-to-{ways[0].address}", daemon=True)
        self._thread.start()

    @property
    def is_lost(self) -> bool:
        return self._error is not None

    @property
    def is_way_broken(self) -> bool:
        """It was lost, and the next one had better go another way."""
        return self._error is not None and self._error.reason == WAY_BROKEN

    @property
    def num_transfers(self) -> int:
        with self._wake:
            return len(self._queue) + len(self._lingering)

    def open(self, target: PushTarget) -> Transfer:
        transfer = Transfer(target, self._layout.num_layers, self)
        with self._wake:
            error = self._error
            if error is None:
                self._queue.add(transfer)
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

    def check_integrity(self) -> None:
        with self._wake:
            self._queue.check_integrity()

    # -- TransferControl ---------------------------------------------------------------------------

    def offer(self, transfer: Transfer, block_ids: tuple[int, ...], num_ready_blocks: int) -> None:
        with self._wake:
            if not transfer.is_ended and transfer.progress.offer_blocks(num_ready_blocks):
                transfer.block_ids = block_ids
                self._wake.notify_all()

    def offer_layers(
        self, transfer: Transfer, block_ids: tuple[int, ...], num_tokens: int, num_layers: int
    ) -> None:
        if not self._is_reserved(transfer, block_ids, num_tokens):
            return  # its commit will say so
        with self._wake:
            if not transfer.is_ended and transfer.progress.offer_layers(num_layers):
                transfer.block_ids = block_ids
                transfer.num_tokens = num_tokens
                self._wake.notify_all()

    def commit(
        self, transfer: Transfer, block_ids: tuple[int, ...], num_tokens: int, first: NewToken
    ) -> None:
        num_blocks = transfer.target.num_blocks
        if not self._is_reserved(transfer, block_ids, num_tokens):
            message = f"{transfer.key}: {num_blocks} blocks are reserved for {num_tokens} tokens"
            self.withdraw(transfer, FailedPrecondition(message, reason="WRONG_BLOCKS"))
            return
        with self._wake:
            if not transfer.is_ended:
                transfer.block_ids = block_ids
                transfer.progress.offer_blocks(num_blocks)
                transfer.num_tokens = num_tokens
                transfer.first = first
                transfer.sampled_at_unix_ns = time.time_ns()
                transfer.hidden_bytes = transfer.bytes_acknowledged
                self._wake.notify_all()

    def _is_reserved(self, transfer: Transfer, block_ids: tuple[int, ...], num_tokens: int) -> bool:
        num_blocks = transfer.target.num_blocks
        return len(block_ids) >= num_blocks and self._layout.num_blocks_for(num_tokens) == num_blocks

    def withdraw(self, transfer: Transfer, error: PdserveError | None) -> None:
        with self._wake:
            if transfer.is_ended:
                return
            self._queue.withdraw(transfer, error)
            is_over = self._settle(transfer)
            self._wake.notify_all()
        if is_over:
            transfer.resolve()

    # -- ConnectionEvents --------------------------------------------------------------------------

    def on_reply(self, raw: bytes) -> None:
        try:
            answers = decode_answers(raw)
        except FrameError as error:
            self.on_lost(Unavailable(f"no answer but garbage: {error}", reason="KV_STREAM_BROKEN"))
            return
        now = time.monotonic()
        with self._wake:
            answered = [self._queue.answered(header, now) for header in answers]
            over = [transfer for transfer in answered if transfer is not None and self._settle(transfer)]
            self._wake.notify_all()
        for transfer in over:
            transfer.resolve()

    def on_lost(self, error: PdserveError) -> None:
        with self._wake:
            if self._error is None:
                log.info("no more KV to %s: %s", self.way.address, error.message)
                self._error = error
            self._wake.notify_all()

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._connection = connection = self._connect()
            self._reads_late = connection.reads_until_answered
            self._queue.connected(
                self.way.transport,
                is_remote_writer=connection.is_remote_writer,
                is_apart=connection.is_remote_writer or connection.reads_until_answered,
                usual_verify=connection.usual_verify,
            )
            while (due := self._next()) is not None:
                self._send(connection, due)
        except PdserveError as error:
            self.on_lost(error)
        finally:
            self._finish()

    def _connect(self) -> Connection:
        """By the first way that can be used. Raises Unavailable."""
        reasons: list[str] = []
        for way in self.ways:
            try:
                connection = self._transports[way.transport].connect(way, self)
            except WayUnusable as error:
                reasons.append(f"{way.transport}: {error}")
                if isinstance(error, WaySilent):
                    self._on_silent(way.transport)
            else:
                self.way = way
                instead = f" (not by {'; not by '.join(reasons)})" if reasons else ""
                log.info("KV to %s goes by %s%s", way.address, way.transport, instead)
                return connection
        raise Unavailable(f"no way for KV can be used: {'; '.join(reasons)}", reason="KV_CONNECT")

    def _next(self) -> Due | None:
        """Waits for what is due. None: the way is lost. Raises Unavailable if the peer is silent."""
        with self._wake:
            while self._error is None:
                now = time.monotonic()
                if self._queue.is_peer_silent(now):
                    raise Unavailable(f"{self.way.address} answers nothing any more", reason="KV_ACK_TIMEOUT")
                due = self._queue.next(now)
                if due is not None:
                    self._being_read = due.transfer if isinstance(due.header, Blocks) else None
                    return due
                self._wake.wait(self._queue.patience_s(now))
            return None

    def _send(self, connection: Connection, due: Due) -> None:
        """Without the lock: a Blocks frame gets its bytes and its checksum on the way."""
        header, transfer = due.header, due.transfer
        if not isinstance(header, Blocks) or transfer is None:
            connection.send(header)
            return
        cells = self._cells(transfer, header)
        if self._queue.verify > Verify.OFF:
            header = replace(header, checksum=checksum(cells.pieces))
            transfer.digest.add(header.checksum)
        first = header.first_block - transfer.target.num_cached_blocks
        connection.send(header, cells, transfer.remote_block_ids[first : first + header.num_blocks])
        with self._wake:
            self.bytes_sent += cells.num_bytes
            transfer.bytes_sent += cells.num_bytes
            self._being_read = None
            is_over = self._settle(transfer)
        if is_over:
            transfer.resolve()

    def _cells(self, transfer: Transfer, frame: Blocks) -> Cells:
        block_ids = transfer.block_ids[frame.blocks.start : frame.blocks.stop]
        num_tail_tokens = (transfer.num_tokens or 0) % self._layout.block_size
        has_tail = num_tail_tokens > 0 and frame.blocks.stop == transfer.target.num_blocks
        return Cells(self._blocks, block_ids, frame.layers, num_tail_tokens if has_tail else None)

    def _finish(self) -> None:
        if self._connection is not None:
            self._connection.close()
        with self._wake:
            self._error = self._error or Unavailable("the sending thread ended", reason="KV_STREAM_BROKEN")
            # With the connection closed, nothing is read any more.
            self._being_read, self._reads_late = None, False
            ended = {*self._queue.fail_all(self._error), *self._lingering}
            over = [transfer for transfer in ended if self._settle(transfer)]
        for transfer in over:
            transfer.resolve()
        self._on_end(self)

    def _settle(self, transfer: Transfer) -> bool:
        """Under the lock, after what may have ended it or its reading. True: the caller is to resolve it."""
        if not transfer.is_ended or transfer.is_settled:
            return False
        is_read_late = self._reads_late and transfer.num_payloads_unanswered > 0
        if transfer is self._being_read or is_read_late:
            self._lingering.add(transfer)
            return False
        self._lingering.discard(transfer)
        transfer.is_settled = True
        return True
