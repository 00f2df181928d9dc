"""D's end of Push: every frame of every stream goes through `accept`.

It knows frames, reservations and bytes; not what carried a frame here, and not the engine.
"""

from __future__ import annotations

import logging

from kv_transfer.blocks import BlockStore
from kv_transfer.codec import FrameError, decode, encode
from kv_transfer.frame import Abort, Ack, Blocks, Closed, Commit, Open, Refused, Renew, cut
from kv_transfer.landing import Repeated, ReservedLanding, Unwanted, compare, refusal
from kv_transfer.layout import KVLayout, require_equal
from kv_transfer.reservation import Reservation
from kv_transfer.reservation_table import ReservationTable
from kv_transfer.transport.base import InboundStream, Landing
from kv_transfer.verify import Verify
from pdserve.v1.errors import DataLoss, FailedPrecondition, PdserveError, Unavailable

log = logging.getLogger(__name__)


class Receiver:
    """Thread-safe: each stream calls `accept` from a thread of its own, one frame after the other.

    `verify`: what a hand-over must be checked by at least; None for what is usual on its transport.
    """

    def __init__(
        self,
        instance_id: str,
        layout: KVLayout,
        blocks: BlockStore,
        table: ReservationTable,
        verify: Verify | None = None,
    ) -> None:
        self._instance_id = instance_id
        self._layout = layout
        self._blocks = blocks
        self._table = table
        self._verify = verify

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
            answer = self._apply(stream, header, payload)
        except PdserveError as error:
            return refusal(header, stream, error)
        stream.num_refused = 0
        return encode(answer)

    def land(self, stream: InboundStream, header: Blocks) -> Landing:
        try:
            reservation = self._table.owned(header.key, stream)
            try:
                if self._table.has_begun(reservation, header):
                    return Repeated(header, stream, self._table)
                block_ids = self._table.begin_writing(reservation, header)
            except PdserveError as error:
                self._table.fail(reservation, error)
                raise
        except PdserveError as error:
            return Unwanted(header, refusal(header, stream, error))
        return ReservedLanding(header, stream, self._blocks, self._table, reservation, block_ids)

    def disconnect(self, stream: InboundStream) -> None:
        """The stream has ended, and its thread has left `accept`."""
        error = Unavailable(f"the stream from {stream.peer} broke", reason="KV_STREAM_BROKEN")
        self._table.stream_ended(stream, error)

    def peer_gone(self, stream: InboundStream) -> None:
        self._table.peer_gone(stream)

    def _apply(
        self, stream: InboundStream, header: Open | Blocks | Commit | Renew, payload: memoryview
    ) -> Ack:
        if isinstance(header, Open):
            return self._open(stream, header)
        reservation = self._table.owned(header.key, stream)
        if isinstance(header, Renew):
            self._table.renew(header.key, stream)
        elif header.seq >= reservation.next_seq:  # below: it came twice, and is only acknowledged again
            try:
                self._take(reservation, header, payload)
            except PdserveError as error:
                self._table.fail(reservation, error)
                raise
        return Ack(header.key, header.seq)

    def _open(self, stream: InboundStream, header: Open) -> Ack:
        if header.instance_id != self._instance_id:
            raise FailedPrecondition(f"{header.key} is for another process", reason="WRONG_INSTANCE")
        require_equal(self._layout, header.layout)
        if (header.transport, header.is_remote_writer) != (stream.transport, stream.is_remote_writer):
            told = f"this stream is {stream.transport}'s, not {cut(header.transport)!r}'s"
            raise FailedPrecondition(f"{header.key}: {told}", reason="WRONG_TRANSPORT")
        demanded = stream.usual_verify if self._verify is None else self._verify
        if header.verify < demanded:
            checks = f"verify is {header.verify.name.lower()} there, {demanded.name.lower()} here"
            raise FailedPrecondition(f"{header.key}: {checks}", reason="WEAK_VERIFY")
        reservation = self._table.open(header, stream)
        return Ack(header.key, 0, reservation.blocks_to_write if header.is_remote_writer else ())

    def _take(self, reservation: Reservation, header: Blocks | Commit, payload: memoryview) -> None:
        if isinstance(header, Commit):
            self._table.commit(reservation, header)
            return
        num_bytes = header.num_blocks * header.num_layers * self._layout.layer_bytes
        if len(payload) != (0 if reservation.is_remote else num_bytes):
            raise DataLoss(f"{header.key}: {len(payload)} bytes came, not {num_bytes}", reason="KV_SIZE")
        if reservation.verify > Verify.OFF and not reservation.is_remote:
            compare(header, (payload,), "arrived damaged")
        with self._table.writing(reservation, header) as block_ids:
            if not reservation.is_remote:
                self._blocks.write(block_ids, header.layers, payload)
            if reservation.verify > (Verify.OFF if reservation.is_remote else Verify.CHECKSUM):
                pieces = self._blocks.read(block_ids, header.layers)
                compare(header, pieces, "is not what lies in the blocks")

    def _farewell(self, stream: InboundStream, header: Abort | Closed) -> None:
        if isinstance(header, Abort):
            if self._table.abort(header.key, stream):
                log.info("aborted by the sender: %s", cut(header.reason), extra=header.key.log_ids)
        else:
            self._table.closed(header.key, stream)
