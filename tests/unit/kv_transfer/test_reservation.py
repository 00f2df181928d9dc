from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from engine.errors import IntegrityError
from engine.reservations import BlockReservation
from kv_transfer.frame import Blocks, Commit, Open, TransferKey
from kv_transfer.quarantine import Quarantine
from kv_transfer.reservation import LEGAL_MOVES, Reservation, ReservationState
from kv_transfer.reservation_table import ReservationTable
from kv_transfer.verify import Digest, Verify
from pdserve.v1.errors import Aborted, DataLoss, FailedPrecondition, NotFound, PdserveError, Unavailable
from tests.unit.kv_transfer.hand_over import FIRST, INSTANCE, LAYOUT, Events

KEY = TransferKey("a", 1)
BLOCKS = BlockReservation(1, (10, 11, 12), 1, 12, True)
STREAM, OTHER = object(), object()
STATES = list(ReservationState)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def table(events: Events, clock: Clock) -> ReservationTable:
    return ReservationTable(events, LAYOUT, clock)


def receiving(table: ReservationTable) -> Reservation:
    table.add(KEY, BLOCKS, 5.0)
    return table.open(open_frame(KEY), STREAM)


def open_frame(key: TransferKey, num_blocks: int = 3, is_remote_writer: bool = False) -> Open:
    return Open(key, INSTANCE, "any", LAYOUT, num_blocks, 1, Verify.CHECKSUM, is_remote_writer)


def blocks(
    seq: int, first_block: int, num_blocks: int, layers: range = range(LAYOUT.num_layers), checksum: int = 77
) -> Blocks:
    return Blocks(KEY, seq, first_block, num_blocks, layers.start, len(layers), checksum)


def commit(seq: int, digest: int, num_blocks: int = 3) -> Commit:
    return Commit(KEY, seq, num_blocks, digest, FIRST, 0)


def ready(table: ReservationTable) -> Reservation:
    reservation = receiving(table)
    with table.writing(reservation, blocks(1, 1, 2)) as block_ids:
        assert block_ids == (11, 12)
    table.commit(reservation, commit(2, digest_of(77)))
    return reservation


def digest_of(*checksums: int) -> int:
    digest = Digest()
    for value in checksums:
        digest.add(value)
    return digest.value()


@pytest.mark.parametrize(("source", "target"), list(itertools.product(STATES, STATES)))
def test_only_moves_of_the_table_are_possible(source: ReservationState, target: ReservationState) -> None:
    reservation = Reservation(KEY, BLOCKS, LAYOUT.num_layers, 5.0, 0.0)
    reservation.state = source
    if target in LEGAL_MOVES[source]:
        reservation.move(target)
        assert reservation.state is target
    else:
        with pytest.raises(IntegrityError):
            reservation.move(target)


def test_the_whole_way_ends_with_the_engine_owning_the_blocks(
    table: ReservationTable, events: Events
) -> None:
    ready(table)
    consumed = table.consume(KEY)
    assert consumed is not None
    assert consumed.first == FIRST
    assert events.of(KEY) == ["ready"]
    assert table.num_reservations == 0
    assert table.bytes_received == 2 * LAYOUT.block_bytes


@pytest.mark.parametrize("reach", [receiving, ready, lambda t: t.add(KEY, BLOCKS, 5.0)])
def test_release_frees_once_from_every_state(table: ReservationTable, events: Events, reach) -> None:  # type: ignore[no-untyped-def]
    reach(table)
    assert table.release(KEY)
    assert not table.release(KEY)
    assert events.of(KEY).count("freed") == 1
    assert "failed" not in events.of(KEY)
    assert table.consume(KEY) is None
    assert table.num_reservations == 0


def test_blocks_are_kept_while_a_thread_writes_them(table: ReservationTable, events: Events) -> None:
    reservation = receiving(table)
    writing = table.writing(reservation, blocks(1, 1, 1))
    writing.__enter__()
    table.release(KEY)
    assert events.of(KEY) == ["quarantined"]
    assert table.num_reservations == 1
    table.check_integrity()
    with pytest.raises(Aborted):
        writing.__exit__(None, None, None)
    assert events.of(KEY) == ["quarantined", "freed"]
    assert table.num_reservations == 0


def test_a_remote_writers_blocks_need_its_closed_or_its_death(
    table: ReservationTable, events: Events
) -> None:
    proofs: dict[str, Callable[[TransferKey], None]] = {
        "closed": lambda key: table.closed(key, STREAM),
        "death": lambda key: table.peer_gone(STREAM),
    }
    for name, proof in proofs.items():
        key = TransferKey(name, 0)
        table.add(key, BLOCKS, 5.0)
        table.open(open_frame(key, is_remote_writer=True), STREAM)
        table.stream_ended(STREAM, Unavailable("broken"))
        assert events.of(key) == ["failed", "quarantined"]
        table.closed(key, OTHER)
        assert table.num_reservations == 1
        proof(key)
        assert events.of(key)[-1] == "freed"
    assert table.num_reservations == 0


def test_what_a_sender_keeps_from_being_used_is_told_with_its_age(
    table: ReservationTable, clock: Clock
) -> None:
    for name, stream, now in (("a", STREAM, 10.0), ("b", STREAM, 12.0), ("c", OTHER, 13.0)):
        key, clock.now = TransferKey(name, 0), now
        table.add(key, BLOCKS, 5.0)
        table.open(open_frame(key, is_remote_writer=True), stream)
        table.release(key)
    clock.now = 20.0
    # Of three blocks each one was cached: nobody writes that.
    assert table.quarantines() == [Quarantine(STREAM, 4, 10.0), Quarantine(OTHER, 2, 7.0)]
    table.closed(TransferKey("a", 0), STREAM)
    table.peer_gone(OTHER)
    assert table.quarantines() == [Quarantine(STREAM, 2, 8.0)]
    table.peer_gone(STREAM)
    assert table.quarantines() == []


def test_a_lease_runs_anew_from_each_frame_and_ends_in_expired(
    table: ReservationTable, events: Events, clock: Clock
) -> None:
    reservation = receiving(table)
    clock.now = 4.0
    assert table.expire() == 1.0
    table.renew(KEY, STREAM)
    clock.now = 8.0
    assert table.expire() == 1.0
    with table.writing(reservation, blocks(1, 1, 1)):
        pass
    clock.now = 12.9
    assert table.expire() == pytest.approx(0.1)
    clock.now = 13.0
    assert table.expire() is None
    assert events.of(KEY) == ["failed", "freed"]
    assert events.errors[KEY].reason == "LEASE_EXPIRED"
    assert table.num_expired_leases == 1
    with pytest.raises(FailedPrecondition):
        table.renew(KEY, STREAM)


def test_a_ready_reservation_does_not_expire(table: ReservationTable, clock: Clock) -> None:
    ready(table)
    clock.now = 1e9
    assert table.expire() is None
    assert table.consume(KEY) is not None


@pytest.mark.parametrize(
    ("attempt", "error"),
    [
        (lambda t, r: t.owned(TransferKey("b", 1), STREAM), NotFound),  # forged
        (lambda t, r: t.owned(TransferKey("a", 0), STREAM), FailedPrecondition),  # stale
        (lambda t, r: t.owned(KEY, OTHER), FailedPrecondition),  # foreign
        (lambda t, r: t.open(open_frame(KEY), OTHER), FailedPrecondition),  # taken
        (lambda t, r: t.renew(KEY, OTHER), FailedPrecondition),
        (lambda t, r: t.open(open_frame(KEY, 4), STREAM), FailedPrecondition),
        (lambda t, r: t.add(KEY, BLOCKS, 5.0), FailedPrecondition),
        (lambda t, r: t.require_unused(TransferKey("a", 0)), FailedPrecondition),
        (lambda t, r: t.writing(r, blocks(2, 1, 1)).__enter__(), Aborted),  # a gap
        (lambda t, r: t.writing(r, blocks(1, 0, 1)).__enter__(), FailedPrecondition),  # cached
        (lambda t, r: t.writing(r, blocks(1, 1, 3)).__enter__(), FailedPrecondition),  # too far
        (lambda t, r: t.commit(r, commit(1, digest_of())), DataLoss),  # blocks are missing
    ],
)
def test_what_does_not_belong_is_refused_and_changes_nothing(
    table: ReservationTable,
    attempt,  # type: ignore[no-untyped-def]
    error: type[PdserveError],
) -> None:
    reservation = receiving(table)
    with pytest.raises(error):
        attempt(table, reservation)
    assert reservation.state is ReservationState.RECEIVING
    assert reservation.num_writers == 0
    table.release(KEY)


def test_a_wrong_digest_is_data_loss(table: ReservationTable) -> None:
    reservation = receiving(table)
    with table.writing(reservation, blocks(1, 1, 2)):
        pass
    with pytest.raises(DataLoss):
        table.commit(reservation, commit(2, digest_of(78)))
    table.release(KEY)


def test_a_used_hand_off_is_refused_whatever_comes(table: ReservationTable) -> None:
    reservation = ready(table)
    table.consume(KEY)
    for attempt in (
        lambda: table.open(open_frame(KEY), STREAM),
        lambda: table.owned(KEY, STREAM),
        lambda: table.add(KEY, BLOCKS, 5.0),
        lambda: table.require_unused(KEY),
    ):
        with pytest.raises(FailedPrecondition):
            attempt()
    with pytest.raises(Aborted):
        table.commit(reservation, commit(3, digest_of(77)))


def test_a_release_before_its_reserve_keeps_the_late_reserve_out(table: ReservationTable) -> None:
    assert not table.release(KEY)
    with pytest.raises(FailedPrecondition):
        table.require_unused(KEY)


def test_a_newer_epoch_ends_the_older_one(table: ReservationTable, events: Events) -> None:
    table.add(KEY, BLOCKS, 5.0)
    newer = TransferKey("a", 2)
    table.add(newer, BLOCKS, 5.0)
    assert events.of(KEY) == ["freed"]
    assert table.num_reservations == 1
    table.release(newer)


def test_a_broken_stream_ends_only_what_it_was_filling(table: ReservationTable, events: Events) -> None:
    receiving(table)
    second, third = TransferKey("b", 0), TransferKey("c", 0)
    table.add(second, BLOCKS, 5.0)
    table.add(third, BLOCKS, 5.0)
    table.open(open_frame(third), OTHER)
    table.stream_ended(STREAM, Unavailable("broken"))
    assert events.of(KEY) == ["failed", "freed"]
    assert table.num_reservations == 2
    table.release(second)
    table.release(third)
