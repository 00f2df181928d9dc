"""A worker only moves as the table says; every change is told."""

from __future__ import annotations

import itertools

import pytest

from cluster.control.membership import IllegalMove, Member, Membership, WorkerState
from worker.identity import Role

S = WorkerState
LEGAL = {
    (S.STARTING, S.READY),
    (S.READY, S.UNHEALTHY),
    (S.UNHEALTHY, S.READY),
    (S.READY, S.DRAINING),
    (S.UNHEALTHY, S.DRAINING),
    (S.DRAINING, S.STOPPED),
    (S.STARTING, S.DEAD),
    (S.READY, S.DEAD),
    (S.UNHEALTHY, S.DEAD),
    (S.DRAINING, S.DEAD),
}


@pytest.mark.parametrize(("before", "after"), list(itertools.product(S, S)))
def test_only_the_moves_of_the_table_are_made(before: S, after: S) -> None:
    membership = Membership({Role.DECODE: 1}, lambda: None)
    member = Member("decode-0", Role.DECODE, "a", state=before)
    membership.add(member)
    if (before, after) in LEGAL:
        membership.move(member, after)
        assert member.state is after
    else:
        with pytest.raises(IllegalMove):
            membership.move(member, after)
        assert member.state is before


def test_every_change_is_a_new_version_and_is_told() -> None:
    told: list[int] = []
    membership = Membership({Role.DECODE: 1}, lambda: told.append(membership.version))
    member = Member("decode-0", Role.DECODE, "a")
    membership.add(member)
    membership.describe(member, "loading")
    membership.describe(member, "loading")  # nothing new
    membership.move(member, S.READY)
    membership.set_target(Role.DECODE, 2)
    membership.remove(member)
    assert told == [2, 3, 4, 5, 6]


def test_a_replacement_takes_the_place_of_the_dead() -> None:
    membership = Membership({Role.DECODE: 1}, lambda: None)
    dead = Member("decode-0", Role.DECODE, "a")
    membership.add(dead)
    membership.move(dead, S.DEAD, "its process ended")
    assert membership.find("decode-0") is None
    new = Member("decode-0", Role.DECODE, "b")
    membership.add(new)
    assert list(membership.members()) == [new]
    assert membership.find("decode-0") is new
