"""Who belongs to the cluster, and in which state. Plain books: no Ray, no network, no clock.

    STARTING ─→ READY ⇄ UNHEALTHY
                  └─────────┴─→ DRAINING ─→ STOPPED        any but STOPPED ─→ DEAD

A member is one process for all its life; the one that replaces it has the same worker id and another key.
DRAINING gets no new work and loses none. STOPPED and DEAD members leave the books as soon as everybody
who watches was told, a DEAD one when its replacement begins, so that the reason can be read until then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from pdserve.v1.cluster_pb2 import WorkerStatus
from worker.identity import Role


class WorkerState(Enum):
    STARTING = "starting"
    READY = "ready"
    UNHEALTHY = "unhealthy"
    DRAINING = "draining"
    STOPPED = "stopped"
    DEAD = "dead"


_S = WorkerState
_LEGAL: dict[WorkerState, frozenset[WorkerState]] = {
    _S.STARTING: frozenset({_S.READY, _S.DEAD}),
    _S.READY: frozenset({_S.UNHEALTHY, _S.DRAINING, _S.DEAD}),
    _S.UNHEALTHY: frozenset({_S.READY, _S.DRAINING, _S.DEAD}),
    _S.DRAINING: frozenset({_S.STOPPED, _S.DEAD}),
    _S.STOPPED: frozenset(),
    _S.DEAD: frozenset(),
}
# States in which a member counts for its pool's target, and those in which its RPCs are served.
COUNTED = frozenset({_S.STARTING, _S.READY, _S.UNHEALTHY})
SERVING = frozenset({_S.READY, _S.UNHEALTHY, _S.DRAINING})


class IllegalMove(Exception):
    """A worker was to go from one state to another that does not follow it: a bug."""


@dataclass(slots=True)
class Member:
    worker_id: str  # "prefill-0": its place in the pool
    role: Role
    key: str  # this process, and no later one in its place
    state: WorkerState = WorkerState.STARTING
    detail: str = ""
    pid: int | None = None
    node: str = ""
    address: str | None = None
    # What it last said of itself (Describe).
    report: WorkerStatus | None = None
    # It is to go, and be given so long for what it has, as soon as another is ready in its place.
    is_leaving: bool = False
    drain_timeout_s: float | None = None
    # It starts, and no node has room for it now.
    finds_no_room: bool = False

    @property
    def can_drain(self) -> bool:
        return _S.DRAINING in _LEGAL[self.state]


@dataclass(slots=True)
class Pool:
    role: Role
    target: int
    members: list[Member] = field(default_factory=list)
    # Starts that failed since the last one that succeeded.
    num_failures: int = 0
    unrecoverable_reason: str = ""

    def in_states(self, states: frozenset[WorkerState]) -> list[Member]:
        return [member for member in self.members if member.state in states]


class Membership:
    """The pools. Every change makes a new version and is told to `on_change` at once."""

    def __init__(self, targets: dict[Role, int], on_change: Callable[[], None]) -> None:
        self.pools = {role: Pool(role, target) for role, target in targets.items()}
        self.version = 1
        self._on_change = on_change

    def members(self) -> Iterator[Member]:
        for pool in self.pools.values():
            yield from pool.members

    def find(self, worker_id: str) -> Member | None:
        """The living one of that id: a dead predecessor may stand beside it."""
        living = [m for m in self.members() if m.worker_id == worker_id and m.state is not WorkerState.DEAD]
        return living[0] if living else None

    def set_target(self, role: Role, target: int) -> None:
        """What failed under the old target says nothing of the new one."""
        pool = self.pools[role]
        pool.target, pool.num_failures, pool.unrecoverable_reason = target, 0, ""
        self._changed()

    def add(self, member: Member) -> None:
        """It takes the place of a dead one with the same id."""
        pool = self.pools[member.role]
        dead = [m for m in pool.members if m.worker_id == member.worker_id and m.state is WorkerState.DEAD]
        pool.members = [m for m in pool.members if m not in dead] + [member]
        pool.members.sort(key=lambda m: place(m.worker_id))
        self._changed()

    def remove(self, member: Member) -> None:
        self.pools[member.role].members.remove(member)
        self._changed()

    def move(self, member: Member, state: WorkerState, detail: str = "") -> None:
        """Raises IllegalMove."""
        if state not in _LEGAL[member.state]:
            raise IllegalMove(f"{member.worker_id}: {member.state.value} → {state.value}")
        member.state = state
        member.detail = detail
        self._changed()

    def describe(self, member: Member, detail: str) -> None:
        """The state stays; what it is doing changed."""
        if member.detail != detail:
            member.detail = detail
            self._changed()

    def start_succeeded(self, role: Role) -> None:
        pool = self.pools[role]
        pool.num_failures, pool.unrecoverable_reason = 0, ""

    def start_failed(self, role: Role, unrecoverable_reason: str) -> None:
        pool = self.pools[role]
        pool.num_failures += 1
        pool.unrecoverable_reason = unrecoverable_reason
        if unrecoverable_reason:
            for member in pool.members:
                member.is_leaving = False  # nobody comes in its place
        self._changed()

    def note_change(self) -> None:
        """Of something that is told along with the members."""
        self._changed()

    def _changed(self) -> None:
        self.version += 1
        self._on_change()


def place(worker_id: str) -> int:
    """ "prefill-3" → 3."""
    return int(worker_id.rpartition("-")[2])
