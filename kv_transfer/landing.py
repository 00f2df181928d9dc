"""Where the payload of one Blocks frame goes that comes apart from it, on a way of its transport's own."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from kv_transfer.blocks import BlockStore, HostBlocks, Payload, host_bytes, neighbours, parts
from kv_transfer.codec import FrameError, encode
from kv_transfer.frame import Ack, Blocks, Commit, Open, Refused, Renew, cut
from kv_transfer.reservation import Reservation
from kv_transfer.reservation_table import ReservationTable
from kv_transfer.transport.base import InboundStream
from kv_transfer.verify import Buffer, Verify, checksum
from pdserve.v1.errors import DataLoss, PdserveError

# In a row: more than a sender has on its way when a transfer fails, many times over.
MAX_REFUSED = 1000
_MAX_REFUSALS_LOGGED = 10
log = logging.getLogger(__name__)


class ReservedLanding:
    """From its making until `done` or `lost` the frame's blocks are nobody else's. Landings of one stream are
    done in the order in which they were made."""

    is_wanted = True

    def __init__(
        self,
        header: Blocks,
        stream: InboundStream,
        blocks: BlockStore,
        table: ReservationTable,
        reservation: Reservation,
        block_ids: tuple[int, ...],
    ) -> None:
        self.header = header
        self._stream = stream
        self._blocks = blocks
        self._table = table
        self._reservation = reservation
        self._block_ids = block_ids
        self._damage: DataLoss | None = None
        self._is_in_place = False

    def neighbours(self) -> list[int]:
        if self.header.num_layers < self._blocks.layout.num_layers:
            return [1] * len(self._block_ids)
        is_last = self.header.blocks.stop == self._reservation.num_blocks
        return [*neighbours(self._block_ids[:-1]), 1] if is_last else neighbours(self._block_ids)

    def pieces(self, neighbours: Sequence[int]) -> list[memoryview]:
        if not isinstance(self._blocks, HostBlocks):
            raise TypeError("nothing can be received in place on a GPU")
        self._is_in_place = True
        cut = parts(self._block_ids, neighbours)
        return [self._blocks.stretch(block_ids, self.header.layers) for block_ids in cut]

    def write(self, payload: Payload) -> None:
        """All of it, which lies elsewhere. What does not pass its check is not written."""
        try:
            if self._reservation.verify > Verify.OFF:
                compare(self.header, (host_bytes(payload),), "arrived damaged")
            self._blocks.write(self._block_ids, self.header.layers, payload)
        except DataLoss as error:
            self._damage = error

    def done(self) -> bytes:
        """All of it is there: the answer."""
        try:
            self._check()
        except DataLoss as error:
            self._table.end_writing(self._reservation, self.header, is_whole=False)
            return self._refuse(error)
        except BaseException:
            self.lost()
            raise
        try:
            self._table.end_writing(self._reservation, self.header, is_whole=True)
        except PdserveError as error:
            return self._refuse(error)
        self._stream.num_refused = 0
        return encode(Ack(self.header.key, self.header.seq))

    def lost(self) -> None:
        """It will not come, and nobody writes it any more."""
        self._table.end_writing(self._reservation, self.header, is_whole=False)

    def _check(self) -> None:
        """In place, what has arrived is what lies in the blocks."""
        if self._damage is not None:
            raise self._damage
        if self._reservation.verify > (Verify.OFF if self._is_in_place else Verify.CHECKSUM):
            pieces = self._blocks.read(self._block_ids, self.header.layers)
            compare(self.header, pieces, "is not what lies in the blocks")

    def _refuse(self, error: PdserveError) -> bytes:
        self._table.fail(self._reservation, error)
        return refusal(self.header, self._stream, error)


class Unwanted:
    """A payload that is on its way all the same; it is dropped."""

    is_wanted = False

    def __init__(self, header: Blocks, answer: bytes) -> None:
        self.header = header
        self._answer = answer

    def neighbours(self) -> list[int]:
        return []

    def pieces(self, neighbours: Sequence[int]) -> list[memoryview]:
        return []

    def write(self, payload: Payload) -> None:
        pass

    def done(self) -> bytes:
        return self._answer

    def lost(self) -> None:
        pass


class Repeated(Unwanted):
    """Of a frame that came before, and is only acknowledged again, if its transfer lives then."""

    def __init__(self, header: Blocks, stream: InboundStream, table: ReservationTable) -> None:
        super().__init__(header, encode(Ack(header.key, header.seq)))
        self._stream = stream
        self._table = table

    def done(self) -> bytes:
        try:
            self._table.owned(self.header.key, self._stream)
        except PdserveError as error:
            return refusal(self.header, self._stream, error)
        return super().done()


def compare(header: Blocks, pieces: Iterable[Buffer], otherwise: str) -> None:
    """Raises DataLoss."""
    if checksum(pieces) != header.checksum:
        raise DataLoss(f"{header.key}: frame {header.seq} {otherwise}", reason="KV_CHECKSUM")


def refusal(header: Open | Blocks | Commit | Renew, stream: InboundStream, error: PdserveError) -> bytes:
    """The answer. Raises FrameError where nothing but such frames comes."""
    stream.num_refused += 1
    if stream.num_refused > MAX_REFUSED:
        raise FrameError(f"{MAX_REFUSED} frames in a row were refused")
    if stream.num_refused <= _MAX_REFUSALS_LOGGED:
        last = ", and what follows" if stream.num_refused == _MAX_REFUSALS_LOGGED else ""
        log.warning(
            "refused from=%s%s: %s", stream.peer, last, cut(error.message, 400), extra=header.key.log_ids
        )
    code = int(error.code.value[0])
    return encode(Refused(header.key, header.seq, code, error.reason, error.message))
