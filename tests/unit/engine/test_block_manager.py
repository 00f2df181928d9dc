from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_manager import BlockManager, BlockState
from engine.errors import IntegrityError, NoRoom
from engine.prefix import extend_hashes, root_hash

NUM_BLOCKS = 12
NAMES = [bytes([i]) for i in range(6)]


def test_a_released_block_stays_a_hit_until_it_is_evicted():
    blocks = BlockManager(2)
    (first,) = blocks.take([], 1)
    blocks.register(first, NAMES[0])
    blocks.release([first])
    assert blocks.count(BlockState.CACHED) == 1
    assert blocks.num_available == 2
    assert blocks.match(NAMES[:1]) == [first]
    blocks.take([], 2)
    assert blocks.match(NAMES[:1]) == []


def test_the_least_recently_used_block_is_evicted_first_and_a_tail_before_its_prefix():
    blocks = BlockManager(4)
    old, new = blocks.take([], 2), blocks.take([], 2)
    for block, name in zip(old + new, NAMES, strict=False):
        blocks.register(block, name)
    blocks.release(new)
    blocks.release(old)
    blocks.take([], 1)
    assert [bool(blocks.match([name])) for name in NAMES[:4]] == [True, True, True, False]


def test_a_block_that_is_not_registered_is_no_hit():
    blocks = BlockManager(2)
    blocks.take([], 1)
    assert blocks.match(NAMES) == []


def test_hits_that_nobody_holds_use_up_room():
    blocks = BlockManager(2)
    taken = blocks.take([], 2)
    blocks.register(taken[0], NAMES[0])
    blocks.release(taken)
    hits = blocks.match(NAMES[:1])
    assert blocks.can_take(hits, 1)
    assert not blocks.can_take(hits, 2)
    with pytest.raises(NoRoom):
        blocks.take(hits, 2)


def test_quarantined_blocks_are_given_to_nobody():
    blocks = BlockManager(3)
    reserved = blocks.reserve([], 2)
    blocks.quarantine(reserved)
    assert blocks.num_available == 1
    with pytest.raises(NoRoom):
        blocks.take([], 2)
    blocks.release(reserved)
    assert blocks.num_available == 3


def test_a_forgotten_block_is_no_hit_and_stays_with_its_holder():
    blocks = BlockManager(3)
    held, cached = blocks.take([], 2)
    blocks.register(held, NAMES[0])
    blocks.register(cached, NAMES[1])
    blocks.release([cached])
    blocks.forget([held, cached])
    assert blocks.match(NAMES[:1]) == blocks.match(NAMES[1:2]) == []
    blocks.check_integrity({BlockState.HELD: [held]})


def test_releasing_twice_and_registering_what_is_not_held_are_bugs():
    blocks = BlockManager(2)
    taken = blocks.take([], 1)
    blocks.release(taken)
    with pytest.raises(IntegrityError):
        blocks.release(taken)
    with pytest.raises(IntegrityError):
        blocks.register(taken[0], NAMES[0])


def test_check_integrity_finds_an_owner_that_the_manager_does_not_know():
    blocks = BlockManager(2)
    with pytest.raises(IntegrityError):
        blocks.check_integrity({BlockState.HELD: [0]})


def test_block_names_depend_on_the_model_and_on_everything_before():
    def names(model: str, tokens: list[int]) -> list[bytes]:
        hashes: list[bytes] = []
        extend_hashes(hashes, root_hash(model), tokens, 2, len(tokens) // 2)
        return hashes

    assert names("a", [1, 2, 3, 4]) == names("a", [1, 2, 3, 4, 5])
    assert names("a", [1, 2, 3, 4])[1] != names("a", [9, 2, 3, 4])[1]
    assert not set(names("a", [1, 2, 3, 4])) & set(names("b", [1, 2, 3, 4]))


class Books(RuleBasedStateMachine):
    """Random takes, shares, reservations, quarantines and releases: the books balance after each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(NUM_BLOCKS)
        self.tables: list[list[int]] = []
        self.reserved: list[tuple[list[int], list[int]]] = []
        self.quarantined: list[list[int]] = []

    @rule(num_hits=st.integers(0, 6), num_new=st.integers(0, 5), is_reserving=st.booleans())
    def take(self, num_hits: int, num_new: int, is_reserving: bool) -> None:
        hits = self.blocks.match(NAMES[:num_hits])
        is_possible = self.blocks.can_take(hits, num_new)
        try:
            taken = (self.blocks.reserve if is_reserving else self.blocks.take)(hits, num_new)
        except NoRoom:
            assert not is_possible
            return
        assert is_possible
        assert taken[: len(hits)] == hits
        if is_reserving:
            self.reserved.append((hits, taken[len(hits) :]))
        else:
            self.tables.append(taken)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def register(self, data: st.DataObject, name: bytes) -> None:
        table = data.draw(st.sampled_from(self.tables))
        if table:
            self.blocks.register(data.draw(st.sampled_from(table)), name)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), is_spoiled=st.booleans())
    def release(self, data: st.DataObject, is_spoiled: bool) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        if is_spoiled:
            self.blocks.forget(table)
        self.blocks.release(table)

    @precondition(lambda self: self.reserved)
    @rule(end=st.sampled_from(["claim", "quarantine", "release"]))
    def end_reservation(self, end: str) -> None:
        hits, new = self.reserved.pop(0)
        if end == "claim":
            self.blocks.claim(new)
            self.tables.append(hits + new)
        elif end == "quarantine":
            self.blocks.release(hits)
            self.blocks.quarantine(new)
            self.quarantined.append(new)
        else:
            self.blocks.release(hits + new)

    @precondition(lambda self: self.quarantined)
    @rule()
    def free_quarantine(self) -> None:
        self.blocks.release(self.quarantined.pop())

    @invariant()
    def books_balance(self) -> None:
        held = [b for table in self.tables for b in table] + [b for hits, _ in self.reserved for b in hits]
        self.blocks.check_integrity(
            {
                BlockState.HELD: held,
                BlockState.RESERVED: [b for _, new in self.reserved for b in new],
                BlockState.QUARANTINED: [b for new in self.quarantined for b in new],
            }
        )

    def teardown(self) -> None:
        for table in self.tables:
            self.blocks.release(table)
        for hits, new in self.reserved:
            self.blocks.release(hits + new)
        for new in self.quarantined:
            self.blocks.release(new)
        assert self.blocks.num_available == NUM_BLOCKS


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
