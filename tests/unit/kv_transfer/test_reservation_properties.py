"""Whatever a router, senders and time do to reservations, in any order: every block is given out once, comes
back once, and never while somebody may still write it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.request import NewToken
from engine.reservations import BlockReservation
from kv_transfer.frame import Blocks, Commit, Open, TransferKey
from kv_transfer.layout import KVLayout
from kv_transfer.reservation import Reservation, ReservationState
from kv_transfer.reservation_table import ReservationTable
from kv_transfer.verify import Digest, Verify
from pdserve.v1.errors import PdserveError, Unavailable

LAYOUT = KVLayout(2, 1, 1, 4, "float32", "any")
NUM_BLOCKS, NUM_CACHED = 3, 1
LEASE_S = 5.0
CHECKSUM = 77
KEYS = [TransferKey(name, epoch) for name in ("a", "b") for epoch in (1, 2)]
keys = st.sampled_from(KEYS)
streams = st.sampled_from(["one", "two"])


@dataclass
class Told:
    ready: list[TransferKey] = field(default_factory=list)
    freed: Counter[TransferKey] = field(default_factory=Counter)
    # What must not be freed: writing threads, and processes that were not proved to be done.
    writers: Counter[TransferKey] = field(default_factory=Counter)
    unproven: dict[TransferKey, str] = field(default_factory=dict)

    def on_ready(self, reservation: Reservation) -> None:
        self.ready.append(reservation.key)

    def on_failed(self, reservation: Reservation, error: PdserveError) -> None: ...

    def on_quarantined(self, reservation: Reservation) -> None: ...

    def on_freed(self, reservation: Reservation) -> None:
        assert not self.writers[reservation.key], "freed under a writing thread"
        assert reservation.key not in self.unproven, "freed under a process that may write"
        self.freed[reservation.key] += 1


class Hands(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.told = Told()
        self.table = ReservationTable(self.told, LAYOUT, lambda: self.now)
        self.given: set[TransferKey] = set()
        self.consumed: Counter[TransferKey] = Counter()
        self.opened: dict[TransferKey, tuple[Reservation, str]] = {}
        self.writing: list[tuple[Reservation, Blocks]] = []
        self.num_given = 0

    @rule(key=keys)
    def add(self, key: TransferKey) -> None:
        ids = tuple(range(self.num_given, self.num_given + NUM_BLOCKS))
        reserved = BlockReservation(self.num_given, ids, NUM_CACHED, 10, True)
        if self._is_taken(lambda: self.table.add(key, reserved, LEASE_S)):
            assert key not in self.given, "a key was taken twice"
            self.given.add(key)
            self.num_given += NUM_BLOCKS

    @rule(key=keys, stream=streams, is_remote=st.booleans())
    def open(self, key: TransferKey, stream: str, is_remote: bool) -> None:
        frame = Open(key, "i", "any", LAYOUT, NUM_BLOCKS, NUM_CACHED, Verify.CHECKSUM, is_remote)

        def opening() -> None:
            reservation = self.table.open(frame, stream)
            if key not in self.opened:
                self.opened[key] = (reservation, stream)
                if is_remote:
                    self.told.unproven[key] = stream

        self._is_taken(opening)

    @precondition(lambda self: self.opened)
    @rule(data=st.data(), skew=st.sampled_from([0, 0, 0, 0, 1, -1]))
    def begin_writing(self, data: st.DataObject, skew: int) -> None:
        """Frame n is for block n; most are the one that is due."""
        reservation, _ = self._one(data)
        due = reservation.next_seq + reservation.num_writers
        frame = Blocks(reservation.key, due + skew, max(0, due + skew), 1, 0, LAYOUT.num_layers, CHECKSUM)
        if self._is_taken(lambda: self.table.begin_writing(reservation, frame)):
            self.told.writers[reservation.key] += 1
            self.writing.append((reservation, frame))

    @precondition(lambda self: self.writing)
    @rule(is_whole=st.booleans())
    def end_writing(self, is_whole: bool) -> None:
        reservation, frame = self.writing.pop(0)
        self.told.writers[reservation.key] -= 1
        self._is_taken(lambda: self.table.end_writing(reservation, frame, is_whole))
        if not is_whole:  # as the receiver does
            self.table.fail(reservation, Unavailable("broken"))

    @precondition(lambda self: self.opened)
    @rule(data=st.data(), skew=st.sampled_from([0, 0, 0, 1]), num_frames=st.sampled_from([2, 2, 2, 1]))
    def commit(self, data: st.DataObject, skew: int, num_frames: int) -> None:
        reservation, _ = self._one(data)
        digest = Digest()
        for _ in range(num_frames):
            digest.add(CHECKSUM)
        seq = reservation.next_seq + skew
        frame = Commit(reservation.key, seq, NUM_BLOCKS, digest.value(), NewToken(0, 1, None), 0)
        before = self.told.unproven.pop(reservation.key, None)
        if not self._is_taken(lambda: self.table.commit(reservation, frame)) and before is not None:
            self.told.unproven[reservation.key] = before

    @rule(key=keys)
    def consume(self, key: TransferKey) -> None:
        # Only what was told to be ready is ever asked for.
        if key in self.told.ready and self.table.consume(key) is not None:
            self.consumed[key] += 1

    @rule(key=keys)
    def release(self, key: TransferKey) -> None:
        self.table.release(key)

    @rule(key=keys, stream=streams)
    def abort(self, key: TransferKey, stream: str) -> None:
        self.table.abort(key, stream)

    @rule(key=keys, stream=streams)
    def closed(self, key: TransferKey, stream: str) -> None:
        if self.told.unproven.get(key) == stream:
            del self.told.unproven[key]
        self.table.closed(key, stream)

    @rule(stream=streams)
    def stream_ended(self, stream: str) -> None:
        self.table.stream_ended(stream, Unavailable("broken"))

    @rule(stream=streams)
    def peer_gone(self, stream: str) -> None:
        self.told.unproven = {key: who for key, who in self.told.unproven.items() if who != stream}
        self.table.peer_gone(stream)

    @rule(seconds=st.sampled_from([1.0, LEASE_S + 1]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.table.expire()

    @invariant()
    def every_block_is_somewhere_once(self) -> None:
        self.table.check_integrity()
        back = set(self.told.freed) | set(self.consumed)
        assert max([*self.told.freed.values(), *self.consumed.values()], default=1) == 1
        assert not set(self.told.freed) & set(self.consumed), "freed and consumed"
        assert self.table.num_reservations == len(self.given - back)

    def teardown(self) -> None:
        """When everybody has ended, everything is back."""
        while self.writing:
            self.end_writing(False)
        for key in KEYS:
            self.table.release(key)
        for stream in ("one", "two"):
            self.peer_gone(stream)
        assert self.table.num_reservations == 0
        assert set(self.told.freed) | set(self.consumed) == self.given

    def _one(self, data: st.DataObject) -> tuple[Reservation, str]:
        """Rather the last one that was opened: it may live still."""
        return self.opened[data.draw(st.sampled_from(list(self.opened)[::-1]))]

    def _is_taken(self, act: object) -> bool:
        try:
            act()  # type: ignore[operator]
        except PdserveError:
            return False
        return True


TestHands = Hands.TestCase
TestHands.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


def test_the_machine_reaches_every_state() -> None:
    """By one way through its rules: else it would prove little."""
    hands, key = Hands(), KEYS[0]
    hands.add(key)
    hands.open(key, "one", False)
    reservation = hands.opened[key][0]
    for seq in (1, 2):
        frame = Blocks(key, seq, seq, 1, 0, LAYOUT.num_layers, CHECKSUM)
        hands.table.begin_writing(reservation, frame)
        hands.table.end_writing(reservation, frame, True)
    digest = Digest()
    digest.add(CHECKSUM)
    digest.add(CHECKSUM)
    hands.table.commit(reservation, Commit(key, 3, NUM_BLOCKS, digest.value(), NewToken(0, 1, None), 0))
    hands.consume(key)
    assert reservation.state is ReservationState.CONSUMED
    hands.every_block_is_somewhere_once()
