"""What the controller decides, as functions of what it sees."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count, islice

from cluster.control.membership import COUNTED, Member, Pool, WorkerState, place
from pdserve.v1.cluster_pb2 import KVLayout
from worker.identity import Role

FAILURES_UNTIL_UNRECOVERABLE = 3
_LONGEST_RETRY_DELAY_S = 30.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What brings a pool to its target."""

    start: tuple[str, ...] = ()  # ids of the workers to start
    drain: tuple[Member, ...] = ()
    give_up: tuple[Member, ...] = ()  # not ready yet and not wanted any more
    forget: tuple[Member, ...] = ()  # dead, and nobody will replace them


def plan_pool(pool: Pool) -> Plan:
    counted = [member for member in pool.in_states(COUNTED) if not member.is_leaving]
    leaving = [member for member in pool.in_states(COUNTED) if member.is_leaving]
    dead = pool.in_states(frozenset({WorkerState.DEAD}))
    missing = pool.target - len(counted)
    if missing > 0:
        taken = {member.worker_id for member in pool.members if member.state is not WorkerState.DEAD}
        return Plan(start=tuple(islice(free_ids(pool.role, taken), missing)))
    surplus = sorted(counted, key=_worth)[:-missing] if missing < 0 else []
    may_leave = all(m.state is WorkerState.READY for m in counted) or any(m.finds_no_room for m in counted)
    drain = [member for member in surplus if member.state is not WorkerState.STARTING]
    return Plan(
        drain=(*drain, *(leaving if may_leave else ())),
        give_up=tuple(member for member in surplus if member.state is WorkerState.STARTING),
        forget=tuple(dead),
    )


def free_ids(role: Role, taken: set[str]) -> Iterable[str]:
    names = (f"{role.value}-{number}" for number in count())
    return (name for name in names if name not in taken)


_WORTH = {WorkerState.STARTING: 0, WorkerState.UNHEALTHY: 1, WorkerState.READY: 2}


def _worth(member: Member) -> tuple[int, int]:
    """Who goes first: the useless, then the last in the pool, busy or not, since nothing is lost."""
    return _WORTH[member.state], -place(member.worker_id)


def retry_delay_s(num_failures: int) -> float:
    """How long after so many failed starts in a row the next one waits."""
    # Ten doublings are beyond the limit, and after a thousand a float overflows: that is a night of failures.
    return 0.0 if num_failures == 0 else min(_LONGEST_RETRY_DELAY_S, 2.0 ** min(num_failures - 1, 10))


class Restarts:
    """Of a part that ends by itself: at once the first time, then ever later."""

    # One that lived so long has not failed at its start.
    _LIVED_S = 60.0

    def __init__(self) -> None:
        self._num_failures = 0

    def note_end(self, lived_s: float) -> None:
        self._num_failures = 0 if lived_s > self._LIVED_S else self._num_failures + 1

    @property
    def delay_s(self) -> float:
        return retry_delay_s(max(0, self._num_failures - 1))


def layout_difference(layout: KVLayout, others: Iterable[tuple[str, KVLayout]]) -> str | None:
    """Why KV of this layout cannot go to or come from one of the others; None if it can."""
    for name, other in others:
        for field in layout.DESCRIPTOR.fields:
            mine, theirs = getattr(layout, field.name), getattr(other, field.name)
            if mine != theirs:
                return f"its KV differs from that of {name}: {field.name} is {mine}, not {theirs}"
    return None
