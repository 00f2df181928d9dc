"""Between the KV threads that fill reservations and the engine's thread that takes them over."""

from __future__ import annotations

from typing import Protocol

from engine.engine import Engine
from engine.limits import check_named_ids
from engine.loop import EngineLoop
from engine.request import EngineLoad, NewToken, SequenceRequest
from engine.reservations import BlockReservation
from kv_transfer.blocks import pool_blocks
from kv_transfer.frame import TransferKey
from kv_transfer.receiver import Receiver
from kv_transfer.reservation import Reservation
from kv_transfer.reservation_table import ReservationTable
from kv_transfer.verify import Verify
from pdserve.v1.errors import Internal, PdserveError
from worker.engine_calls import post_to_engine


class IntakeListener(Protocol):
    """Called from any thread; must not block."""

    def joined(self, reservation: Reservation, first: NewToken, load: EngineLoad) -> None:
        """Its KV is here and its sequence joins the next step. Comes before that step's result."""
        ...

    def broke(self, key: TransferKey, error: PdserveError) -> None: ...

    def quarantined(self, load: EngineLoad) -> None:
        """Blocks are nobody's now, and not back yet."""
        ...

    def freed(self, key: TransferKey, load: EngineLoad) -> None:
        """Its blocks are back, and it will not run. Comes after `broke`, if that comes."""
        ...


class Intake:
    """Every block that the engine reserves here comes back to it: as a sequence's, or released.

    A reservation becomes a sequence on the engine's thread, in the call that its commit queued; the
    reservation table decides whether that call or a release comes first.
    """

    def __init__(
        self, loop: EngineLoop, instance_id: str, listener: IntakeListener, verify: Verify | None
    ) -> None:
        engine = loop.engine
        blocks = pool_blocks(engine.pool)
        self.table = ReservationTable(self, engine.layout)
        self.receiver = Receiver(instance_id, engine.layout, blocks, self.table, verify)
        self._loop = loop
        self._listener = listener
        # What will run once the KV is here; an entry for each living reservation.
        self._requests: dict[TransferKey, SequenceRequest] = {}

    def reserve(
        self, engine: Engine, key: TransferKey, request: SequenceRequest, lease_s: float
    ) -> BlockReservation:
        """On the engine's thread. Raises NoRoom or CannotFit, FailedPrecondition for a key that was used."""
        check_named_ids(engine.limits, request)
        tokens = (*request.prompt_token_ids, *request.known_token_ids)
        blocks = engine.reserve(tokens, request.stop.max_tokens - len(request.known_token_ids))
        self._requests[key] = request
        try:
            self.table.add(key, blocks, lease_s)
        except PdserveError:
            del self._requests[key]
            engine.release_reservation(blocks)
            raise
        return blocks

    # -- ReservationEvents: under the table's lock, from any thread -----------------------------------

    def on_ready(self, reservation: Reservation) -> None:
        post_to_engine(self._loop, lambda engine: self._join(engine, reservation.key))

    def on_failed(self, reservation: Reservation, error: PdserveError) -> None:
        self._listener.broke(reservation.key, error)

    def on_quarantined(self, reservation: Reservation) -> None:
        post_to_engine(self._loop, lambda engine: self._quarantine(engine, reservation))

    def on_freed(self, reservation: Reservation) -> None:
        post_to_engine(self._loop, lambda engine: self._free(engine, reservation))

    # -- on the engine's thread --------------------------------------------------------------------

    def _join(self, engine: Engine, key: TransferKey) -> None:
        reservation = self.table.consume(key)
        if reservation is None or reservation.first is None:
            return  # released after its commit
        request = self._requests.pop(key)
        try:
            engine.add_computed(request, reservation.blocks, reservation.first)
        except ValueError as error:  # P committed what does not belong to the request
            engine.release_reservation(reservation.blocks)
            self._listener.broke(key, Internal(str(error), reason="WRONG_COMMIT"))
            self._listener.freed(key, engine.snapshot())
        else:
            self._listener.joined(reservation, reservation.first, engine.snapshot())

    def _quarantine(self, engine: Engine, reservation: Reservation) -> None:
        engine.quarantine(reservation.blocks)
        self._listener.quarantined(engine.snapshot())

    def _free(self, engine: Engine, reservation: Reservation) -> None:
        self._requests.pop(reservation.key, None)
        engine.release_reservation(reservation.blocks)
        self._listener.freed(reservation.key, engine.snapshot())
