"""D's end of Push: every frame of every stream goes through `accept`.

It knows frames, reservations and bytes; not what carried a frame here, and not the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from kv_transfer.blocks import BlockStore
from kv_transfer.frame import (
    Abort,
    Ack,
    Blocks,
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
    encode,
)
from kv_transfer.layout import KVLayout, require_equal
from kv_transfer.reservation import Reservation
from kv_transfer.reservation_table import ReservationTable
from kv_transfer.transport.base import InboundStream
from pdserve.v1.errors import DataLoss, FailedPrecondition, PdserveError, Unavailable

log = logging.getLogger(__name__)


class Receiver:
    """Thread-safe: each stream calls `accept` from a thread of its own, one frame after the other."""

    def __init__(
        self,
        instance_id: str,
        layout: KVLayout,
        blocks: BlockStore,
        table: ReservationTable,
        transports: Collection[str] = ("grpc", "memory"),
    ) -> None:
        self._instance_id = instance_id
        self._layout = layout
        self._blocks = blocks
        self._table = table
        self._transports = frozenset(transports)

    def connect(self, peer: str) -> InboundStream:
        return InboundStream(peer)

    def accept(self, stream: InboundStream, raw: bytes) -> bytes | None:
        """Applies one frame; the answer to send, or None where the frame takes none.

        Raises FrameError for bytes that are no frame of a prefill worker: the stream must be ended.
        """
        header, payload = decode(raw)
        if isinstance(header, Abort | Closed):
            self._farewell(stream, header)
            return None
        if isinstance(header, Ack | Refused):
            raise FrameError(f"{type(header).__name__} came from the wrong side")
        try:
            self._apply(stream, header, payload)
        except PdserveError as error:
            log.warning("refused transfer_id=%s from=%s: %s", header.key, stream.peer, error.message)
            return encode(_refusal(header.key, header.seq, error))
        return encode(Ack(header.key, header.seq))

    def disconnect(self, stream: InboundStream) -> None:
        """The stream has ended, and its thread has left `accept`."""
        error = Unavailable(f"the stream from {stream.peer} broke", reason="KV_STREAM_BROKEN")
        self._table.stream_ended(stream, error)

    def _apply(
        self, stream: InboundStream, header: Open | Blocks | Commit | Renew, payload: memoryview
    ) -> None:
        if isinstance(header, Open):
            self._open(stream, header)
            return
        reservation = self._table.owned(header.key, stream)
        if isinstance(header, Renew):
            self._table.renew(header.key, stream)
        elif header.seq >= reservation.next_seq:  # below: it came twice, and is only acknowledged again
            try:
                self._take(reservation, header, payload)
            except PdserveError as error:
                self._table.fail(reservation, error)
                raise

    def _open(self, stream: InboundStream, header: Open) -> None:
        if header.instance_id != self._instance_id:
            raise FailedPrecondition(f"{header.key} is for another process", reason="WRONG_INSTANCE")
        require_equal(self._layout, header.layout)
        if header.transport not in self._transports:
            raise FailedPrecondition(f"no transport {header.transport!r} here", reason="WRONG_TRANSPORT")
        self._table.open(header.key, stream, (header.num_blocks, header.num_cached_blocks))

    def _take(self, reservation: Reservation, header: Blocks | Commit, payload: memoryview) -> None:
        if isinstance(header, Commit):
            self._table.commit(reservation, header)
            return
        size = self._blocks.block_bytes
        if header.num_blocks == 0 or len(payload) != header.num_blocks * size:
            raise DataLoss(
                f"{header.key}: {len(payload)} bytes for {header.num_blocks} blocks", reason="KV_SIZE"
            )
        if checksum((payload,)) != header.checksum:
            raise DataLoss(f"{header.key}: frame {header.seq} arrived damaged", reason="KV_CHECKSUM")
        with self._table.writing(reservation, header) as block_ids:
            for index, block_id in enumerate(block_ids):
                self._blocks.write(block_id, payload[index * size : (index + 1) * size])

    def _farewell(self, stream: InboundStream, header: Abort | Closed) -> None:
        if isinstance(header, Abort):
            log.info("aborted by the sender transfer_id=%s: %s", header.key, header.reason)
            self._table.abort(header.key, stream)
        else:
            self._table.closed(header.key, stream)


def _refusal(key: TransferKey, seq: int, error: PdserveError) -> Header:
    return Refused(key, seq, int(error.code.value[0]), error.reason, error.message)
