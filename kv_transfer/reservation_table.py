"""All reservations of one decode worker, and the rules by which frames, releases and leases change them."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from engine.errors import IntegrityError
from engine.reservations import BlockReservation
from kv_transfer.counters import TransferCounts, TransportCounters
from kv_transfer.frame import Blocks, Commit, Open, TransferKey
from kv_transfer.layout import KVLayout
from kv_transfer.quarantine import Quarantine
from kv_transfer.reservation import CAN_STILL_END, HOLDS_A_LEASE, Reservation, ReservationState
from kv_transfer.used_keys import UsedKeys
from pdserve.v1.errors import Aborted, FailedPrecondition, NotFound, PdserveError, Unavailable


class ReservationEvents(Protocol):
    """What the owner is told. Called under the table's lock, in the order in which things happened: an
    implementation passes the event on and returns, and never calls the table back."""

    def on_ready(self, reservation: Reservation) -> None: ...

    def on_failed(self, reservation: Reservation, error: PdserveError) -> None:
        """It ended without its router having asked for that."""

    def on_quarantined(self, reservation: Reservation) -> None:
        """It ended, and somebody may still write its blocks."""

    def on_freed(self, reservation: Reservation) -> None: ...


class ReservationTable:
    """Thread-safe. Keyed by (transfer_id, epoch); of one transfer_id only the newest epoch lives."""

    def __init__(
        self, events: ReservationEvents, layout: KVLayout, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._events = events
        self._layout = layout
        self._clock = clock
        self._lock = threading.Lock()
        self._living: dict[TransferKey, Reservation] = {}
        # Ended, and waiting for the proof that nobody writes their blocks.
        self._quarantined: dict[TransferKey, Reservation] = {}
        self._used = UsedKeys()
        self.num_expired_leases = 0
        self.bytes_received = 0
        self.counters = TransportCounters()

    # -- the router's side -------------------------------------------------------------------------

    def require_unused(self, key: TransferKey) -> None:
        """Raises FailedPrecondition for a key that was used or released, or is older than one that was."""
        with self._lock:
            self._used.require_unused(key)

    def add(self, key: TransferKey, blocks: BlockReservation, lease_s: float) -> Reservation:
        """Takes over `blocks`: they come back through `on_freed`, or go to the engine by `consume`."""
        with self._lock:
            self._used.require_unused(key)
            for older in [r for k, r in self._living.items() if k.transfer_id == key.transfer_id]:
                self._end(older, ReservationState.ABORTED)
            reservation = Reservation(key, blocks, self._layout.num_layers, lease_s, self._clock())
            self._living[key] = reservation
            self._used.add(key)
            return reservation

    def release(self, key: TransferKey) -> bool:
        """Idempotent. An unknown key is remembered, so that a Reserve that comes late is refused."""
        with self._lock:
            self._used.add(key)
            reservation = self._living.get(key)
            if reservation is not None:
                self._end(reservation, ReservationState.ABORTED)
            return reservation is not None

    def consume(self, key: TransferKey) -> Reservation | None:
        """READY → CONSUMED: the caller now owns the blocks. None where it ended before."""
        with self._lock:
            reservation = self._living.get(key)
            if reservation is None:
                return None
            reservation.move(ReservationState.CONSUMED)
            del self._living[key]
            return reservation

    # -- leases ------------------------------------------------------------------------------------

    def expire(self) -> float | None:
        """Ends what has not been renewed in time. Seconds until the next lease could run out, or None."""
        with self._lock:
            now = self._clock()
            leased = [r for r in self._living.values() if r.state in HOLDS_A_LEASE]
            for reservation in leased:
                if reservation.expires_at <= now:
                    self.num_expired_leases += 1
                    message = f"{reservation.key}: no KV for {reservation.lease_s} s"
                    error = Unavailable(message, reason="LEASE_EXPIRED")
                    self._end(reservation, ReservationState.EXPIRED, error)
            left = [r.expires_at - now for r in leased if r.state in HOLDS_A_LEASE]
            return min(left, default=None)

    # -- the prefill worker's side: `stream` is the Push call that speaks -----------------------------

    def open(self, frame: Open, stream: object) -> Reservation:
        """From here on only `stream` may send for it. The same Open again changes nothing."""
        key = frame.key
        with self._lock:
            reservation = self._find(key)
            expected = (reservation.num_blocks, reservation.blocks.num_cached_blocks)
            if (frame.num_blocks, frame.num_cached_blocks) != expected:
                raise FailedPrecondition(f"{key}: other blocks are reserved here", reason="WRONG_BLOCKS")
            if reservation.stream is stream:
                return reservation
            if reservation.stream is not None:
                raise FailedPrecondition(f"{key} is open on another stream", reason="FOREIGN_STREAM")
            reservation.move(ReservationState.RECEIVING)
            reservation.stream = stream
            reservation.verify = frame.verify
            reservation.is_remote = reservation.has_remote_writer = frame.is_remote_writer
            reservation.transport = frame.transport
            reservation.opened_at = self._clock()
            reservation.next_seq = 1
            reservation.renew(self._clock())
            return reservation

    def owned(self, key: TransferKey, stream: object) -> Reservation:
        """The reservation, if this stream opened it. A refusal here does the reservation no harm."""
        with self._lock:
            return self._owned(key, stream)

    def renew(self, key: TransferKey, stream: object) -> None:
        with self._lock:
            self._owned(key, stream).renew(self._clock())

    @contextmanager
    def writing(self, reservation: Reservation, frame: Blocks) -> Iterator[tuple[int, ...]]:
        """The block ids to write. What was written counts only if the caller leaves without an error, and
        the reservation still lives then."""
        block_ids = self.begin_writing(reservation, frame)
        is_whole = False
        try:
            yield block_ids
            is_whole = True
        finally:
            self.end_writing(reservation, frame, is_whole)

    def has_begun(self, reservation: Reservation, frame: Blocks) -> bool:
        """Whether the frame came before."""
        with self._lock:
            return frame.seq < reservation.next_seq + reservation.num_writers

    def begin_writing(self, reservation: Reservation, frame: Blocks) -> tuple[int, ...]:
        """The block ids to write. Until `end_writing` they cannot be anybody else's. The next frames may be
        begun before this one has ended."""
        with self._lock:
            block_ids = reservation.admit(frame)
            reservation.num_writers += 1
            return block_ids

    def end_writing(self, reservation: Reservation, frame: Blocks, is_whole: bool) -> None:
        """In the order of their beginning. Raises Aborted where the reservation has ended meanwhile."""
        with self._lock:
            reservation.num_writers -= 1
            self._free_if_proven(reservation)
            if not is_whole:
                return
            if reservation.state is not ReservationState.RECEIVING:
                raise Aborted(f"{reservation.key} ended while its blocks arrived", reason="TRANSFER_ENDED")
            self.bytes_received += frame.num_blocks * frame.num_layers * self._layout.layer_bytes
            reservation.next_seq += 1
            reservation.digest.add(frame.checksum)
            reservation.renew(self._clock())

    def commit(self, reservation: Reservation, frame: Commit) -> None:
        """RECEIVING → READY, if every cell is there and the digest is that of what was accepted."""
        with self._lock:
            reservation.check(frame)
            reservation.move(ReservationState.READY)
            reservation.next_seq += 1
            reservation.first = frame.first
            reservation.sampled_at_unix_ns = frame.sampled_at_unix_ns
            reservation.ready_at_unix_ns = time.time_ns()
            reservation.has_remote_writer = False
            self._count(reservation)
            self._events.on_ready(reservation)

    def fail(self, reservation: Reservation, error: PdserveError) -> None:
        """Ends it for something its own stream did. Nothing happens where it ended before."""
        with self._lock:
            if reservation.state in HOLDS_A_LEASE:
                self._end(reservation, ReservationState.ABORTED, error)

    def abort(self, key: TransferKey, stream: object) -> bool:
        """P takes its transfer back; the router hears of it from P. False: there is none to take back."""
        with self._lock:
            reservation = self._living.get(key)
            is_ours = reservation is not None and reservation.stream is stream
            if reservation is None or not is_ours or reservation.state is not ReservationState.RECEIVING:
                return False
            self._end(reservation, ReservationState.ABORTED)
            return True

    def closed(self, key: TransferKey, stream: object) -> None:
        """P's word that no thread of its own will touch the blocks again."""
        with self._lock:
            reservation = self._living.get(key) or self._quarantined.get(key)
            if reservation is not None and reservation.stream is stream:
                reservation.has_remote_writer = False
                self._free_if_proven(reservation)

    def stream_ended(self, stream: object, error: PdserveError) -> None:
        """No frame will come from it any more. That proves nothing about a remote writer."""
        with self._lock:
            for reservation in [r for r in self._living.values() if r.stream is stream]:
                if reservation.state is ReservationState.RECEIVING:
                    self._end(reservation, ReservationState.ABORTED, error)

    def peer_gone(self, stream: object) -> None:
        """Proof that the process behind the stream is dead: nothing of it can write."""
        with self._lock:
            for reservation in [*self._living.values(), *self._quarantined.values()]:
                if reservation.stream is stream:
                    reservation.has_remote_writer = False
                    self._free_if_proven(reservation)

    # -- the books ---------------------------------------------------------------------------------

    @property
    def num_reservations(self) -> int:
        with self._lock:
            return len(self._living) + len(self._quarantined)

    def quarantines(self) -> list[Quarantine]:
        """One for each stream whose sender has not proved that it writes no more."""
        with self._lock:
            now, by_stream = self._clock(), defaultdict[object, list[Reservation]](list)
            for reservation in self._quarantined.values():
                by_stream[reservation.stream].append(reservation)
        return [
            Quarantine(
                stream,
                sum(len(reservation.blocks_to_write) for reservation in waiting),
                now - min(reservation.quarantined_at for reservation in waiting),
            )
            for stream, waiting in by_stream.items()
        ]

    def check_integrity(self) -> None:
        with self._lock:
            for reservation in self._living.values():
                if reservation.state not in CAN_STILL_END:
                    raise IntegrityError(f"{reservation.key} lives in state {reservation.state.name}")
            for reservation in self._quarantined.values():
                is_waiting = reservation.state is ReservationState.QUARANTINED
                if not is_waiting or reservation.is_written_by_nobody:
                    raise IntegrityError(f"{reservation.key} is kept in {reservation.state.name} for nothing")

    # -- under the lock ----------------------------------------------------------------------------

    def _find(self, key: TransferKey) -> Reservation:
        reservation = self._living.get(key)
        if reservation is not None:
            return reservation
        if key in self._used:
            raise FailedPrecondition(f"{key} is over", reason="TRANSFER_ENDED")
        raise NotFound(f"no reservation {key}", reason="UNKNOWN_TRANSFER")

    def _owned(self, key: TransferKey, stream: object) -> Reservation:
        reservation = self._find(key)
        if reservation.stream is not stream:
            raise FailedPrecondition(f"{key} was not opened by this stream", reason="FOREIGN_STREAM")
        return reservation

    def _count(self, reservation: Reservation) -> None:
        num_bytes = len(reservation.blocks_to_write) * self._layout.block_bytes
        transfer_ms = (self._clock() - reservation.opened_at) * 1000
        self.counters.add(reservation.transport, TransferCounts(1, num_bytes, transfer_ms))

    def _end(
        self, reservation: Reservation, how: ReservationState, error: PdserveError | None = None
    ) -> None:
        """`error`: for the router, where it was not the router that ended it, nor P by its own word."""
        reservation.move(how)
        if error is not None:
            self._events.on_failed(reservation, error)
        reservation.move(ReservationState.QUARANTINED)
        reservation.quarantined_at = self._clock()
        del self._living[reservation.key]
        self._quarantined[reservation.key] = reservation
        if reservation.is_written_by_nobody:
            self._free_if_proven(reservation)
        else:
            self._events.on_quarantined(reservation)

    def _free_if_proven(self, reservation: Reservation) -> None:
        if reservation.state is ReservationState.QUARANTINED and reservation.is_written_by_nobody:
            reservation.move(ReservationState.FREED)
            del self._quarantined[reservation.key]
            self._events.on_freed(reservation)
