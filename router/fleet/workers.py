"""The table of workers: rebuilt from each of the controller's snapshots, kept while there is none newer.

The controller's word DEAD or STOPPED ends a worker here at once. One that a snapshot merely leaves out (a
new controller may not have found it yet) gets no new work, and stays until its streams have ended or its
connection breaks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import count

from pdserve.v1 import cluster_pb2
from router.fleet.worker import Worker
from router.fleet.worker_info import Role, WorkerState, info_of
from router.tasks import Tasks
from trust.trust import Trust

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.25
_ENDED = (WorkerState.STOPPED, WorkerState.DEAD)
_LIVING = (WorkerState.READY, WorkerState.UNHEALTHY)
_IS_CLOSED = "is scaled to 0: requests wait until there is a worker"


class Route(Enum):
    """Which pools a request goes through."""

    DISAGGREGATED = (Role.PREFILL, Role.DECODE)
    COLOCATED = (Role.COLOCATED,)


class WorkerTable:
    def __init__(
        self, trust: Trust, router_id: str, tasks: Tasks, timeout_s: float, suspect_after_s: float
    ) -> None:
        self._trust = trust
        self._router_id = router_id
        self._tasks = tasks
        self._timeout_s = timeout_s
        self._suspect_after_s = suspect_after_s
        self._workers: dict[str, Worker] = {}
        # Why a pool cannot come back, by the roles that the cluster has.
        self._pools: dict[Role, str | None] = {}
        # How many workers each pool is to have.
        self.targets: dict[Role, int] = {}
        self._unlisted: set[str] = set()
        self._suspects: set[str] = set()
        self._on_change: list[Callable[[], None]] = []
        self._on_room: list[Callable[[], None]] = []
        self._choices = count(1)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Called when prompt tokens were computed or a worker has become able, or unable, to take work."""
        self._on_change.append(listener)

    def on_room(self, listener: Callable[[], None]) -> None:
        """Called when a worker that had no room for a sequence may have some."""
        self._on_room.append(listener)

    def apply(self, snapshot: cluster_pb2.ClusterSnapshot) -> None:
        self._pools = {Role(pool.role): pool.unrecoverable_reason or None for pool in snapshot.pools}
        self.targets = {Role(pool.role): pool.target for pool in snapshot.pools}
        listed: set[str] = set()
        for pool in snapshot.pools:
            for status in pool.workers:
                listed.add(status.instance_id)
                self._see(status, WorkerState(status.state))
        self._unlisted = self._workers.keys() - listed
        for instance_id in self._unlisted:
            self._workers[instance_id].state = WorkerState.DRAINING
        self._look(0.0)
        self._room()

    def _see(self, status: cluster_pb2.WorkerStatus, state: WorkerState) -> None:
        worker = self._workers.get(status.instance_id)
        if state in _ENDED:
            self._remove(status.instance_id)
            return
        if worker is None:
            if not status.address:
                return  # not started yet
            info = info_of(status)
            worker = Worker(
                info,
                self._trust,
                self._router_id,
                self._tasks,
                self._changed,
                self._room,
                self._timeout_s,
                self._suspect_after_s,
            )
            self._workers[status.instance_id] = worker
            worker.start()
            logger.info("worker=%s instance=%s at %s", info.id, info.instance_id, info.address)
        worker.state = state

    def _remove(self, instance_id: str) -> None:
        worker = self._workers.pop(instance_id, None)
        if worker is None:
            return
        logger.info("worker=%s instance=%s is gone", worker.info.id, worker.info.instance_id)
        worker.lose("is gone")
        self._tasks.start(worker.close(), f"close {worker.info.id}")

    async def watch_silence(self) -> None:
        """Runs until cancelled: who gives no sign of life gets no work, and loses what it has to others."""
        clock = asyncio.get_running_loop().time
        last = clock()
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            now = clock()
            self._look(now - last)
            last = now

    def _look(self, elapsed_s: float) -> None:
        for worker in self._workers.values():
            worker.passed(elapsed_s)
        before, self._suspects = (
            self._suspects,
            {instance_id for instance_id, worker in self._workers.items() if worker.suspicion is not None},
        )
        for worker in self._workers.values():
            if worker.info.instance_id in self._suspects ^ before:
                logger.info("worker=%s %s", worker.info.id, worker.suspicion or "lives after all")
        if self._suspects != before:
            self._room()

    def _move_streams(self) -> None:
        """Off workers that may not live, to others. Where there is none they stay, and wait."""
        for instance_id in tuple(self._suspects):
            worker = self._workers.get(instance_id)
            why = worker.suspicion if worker is not None else None
            if worker is not None and why is not None and self.usable(worker.info.role):
                worker.move(why)

    def _changed(self) -> None:
        self._move_streams()
        for instance_id in tuple(self._unlisted):
            worker = self._workers.get(instance_id)  # removing one comes back to here
            if worker is not None and (worker.is_idle or not worker.is_connected):
                self._remove(instance_id)
        for listener in self._on_change:
            listener()

    def _room(self) -> None:
        for listener in self._on_room:
            listener()
        self._changed()

    def all(self) -> Sequence[Worker]:
        return tuple(self._workers.values())

    def usable(self, role: Role) -> list[Worker]:
        return [each for each in self._workers.values() if each.info.role is role and each.is_usable]

    def get(self, instance_id: str) -> Worker:
        """Of a worker that a view was just made of."""
        return self._workers[instance_id]

    def can_use(self, instance_id: str) -> bool:
        worker = self._workers.get(instance_id)
        return worker is not None and worker.is_usable

    def chosen(self, worker: Worker) -> None:
        worker.last_chosen = next(self._choices)

    @property
    def route(self) -> Route | None:
        """None: the controller has not said yet what there is."""
        for route in Route:
            if all(role in self._pools for role in route.value):
                return route
        return None

    @property
    def is_serving(self) -> bool:
        """Whether a request that came now could be served."""
        route = self.route
        return route is not None and all(self.usable(role) for role in route.value)

    @property
    def unrecoverable_reason(self) -> str | None:
        """One that lives, if not usable right now, will be again: it is others that cannot be started."""
        route = self.route
        for role in route.value if route is not None else ():
            reason = self._pools[role]
            if reason is not None and not self._lives(role):
                return f"the {role.name.lower()} pool cannot recover: {reason}"
        return None

    def _lives(self, role: Role) -> bool:
        """By the controller's word."""
        return any(each.info.role is role and each.state in _LIVING for each in self._workers.values())

    @property
    def reason_to_wait(self) -> str | None:
        """Why a request that came now would wait. None: it would not."""
        route = self.route
        if route is None:
            return "the controller has not said yet which workers there are"
        lacking = [role for role in route.value if not self.usable(role)]
        closed = " and ".join(role.name.lower() for role in lacking if not self.targets[role])
        if closed:
            return f"{closed} {_IS_CLOSED}"
        return (self.unrecoverable_reason or "workers are starting or being replaced") if lacking else None

    @property
    def max_sequence_tokens(self) -> int | None:
        """What every pool can hold, so that what was admitted can be resumed. None: not known yet."""
        limits = [
            limit
            for worker in self._workers.values()
            for limit in (worker.info.max_sequence_tokens, worker.info.max_model_len)
            if limit
        ]
        return min(limits, default=None)

    @property
    def dtype(self) -> str | None:
        return next((worker.info.dtype for worker in self._workers.values() if worker.info.dtype), None)

    async def close(self) -> None:
        workers, self._workers = self._workers, {}
        for worker in workers.values():
            worker.lose("left: the router stops")
        for worker in workers.values():
            await worker.close()
