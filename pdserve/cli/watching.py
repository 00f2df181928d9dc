"""Following a cluster until it is as wanted, every step shown."""

from __future__ import annotations

import asyncio
import time

from rich.markup import escape

from pdserve.cli.console import out
from pdserve.cli.steps import PATIENCE_S, is_waiting
from pdserve.client import Client, Cluster, PdserveError, Pool, Role, Unavailable, Worker, WorkerState

_LOOK_EVERY_S = 0.2
# A router or controller that is away for a moment is no reason to give up.
_AWAY_S = 60.0
# The others end by themselves, or are new.
SERVING = (WorkerState.READY, WorkerState.UNHEALTHY)


class Steps:
    """What was seen last of every worker process; prints what is new, and waiting once it has lasted."""

    def __init__(self, first: Cluster, patience_s: float = PATIENCE_S) -> None:
        self._begun = time.monotonic()
        self._patience_s = patience_s
        self._seen = {worker.id: worker for worker in _workers(first)}
        self._waits_since: dict[str, float] = {}

    def show(self, cluster: Cluster) -> None:
        now = {worker.id: worker for worker in _workers(cluster)}
        for worker_id, before in self._seen.items():
            if worker_id not in now:
                self._waits_since.pop(worker_id, None)
                self._say(worker_id, "gone" if before.state is WorkerState.STARTING else "stopped")
        for worker_id, worker in now.items():
            last = self._seen.get(worker_id)
            is_new = last is None or (last.state, last.detail) != (worker.state, worker.detail)
            if self._is_to_be_told(worker, is_new):
                self._say(worker_id, f"{worker.state.value}{': ' if worker.detail else ''}{worker.detail}")
        self._seen = now

    def _is_to_be_told(self, worker: Worker, is_new: bool) -> bool:
        since = self._waits_since.pop(worker.id, None)
        if is_new and not is_waiting(worker.detail):
            return True
        if is_new:
            since = time.monotonic()
        if since is None:
            return False
        if time.monotonic() - since >= self._patience_s:
            return True
        self._waits_since[worker.id] = since
        return False

    def _say(self, what: str, how: str) -> None:
        out.print(f"[dim]{time.monotonic() - self._begun:5.1f}s[/]  {what:<12} {escape(how)}")


async def wait_until_settled(client: Client, roles: set[Role], steps: Steps, timeout_s: float) -> None:
    """Until these pools have exactly the ready workers that they should have. Raises PdserveError."""
    deadline = time.monotonic() + timeout_s
    while True:
        cluster = await client.get_cluster(timeout=10.0)
        steps.show(cluster)
        pools = [pool for pool in cluster.pools if pool.role in roles]
        for pool in pools:
            if pool.unrecoverable_reason:
                raise Unavailable(f"{pool.role.value}: {pool.unrecoverable_reason}")
        if all(is_whole(pool) for pool in pools):
            return
        if time.monotonic() > deadline:
            waiting = [
                f"{w.id} {w.detail}"
                for pool in pools
                for w in pool.workers
                if w.state is not WorkerState.READY
            ]
            told = "".join(f"; {each}" for each in waiting)
            background = "it goes on in the background, see pdserve status"
            raise PdserveError(f"not done after {timeout_s:g} s; {background}{told}")
        await asyncio.sleep(_LOOK_EVERY_S)


def is_whole(pool: Pool) -> bool:
    """It has exactly the ready workers that it should have."""
    return [each.state for each in pool.workers] == [WorkerState.READY] * pool.target


async def wait_until_at_rest(client: Client, cluster: Cluster, roles: list[Role], steps: Steps) -> list[Pool]:
    """The pools when nobody comes or goes in them any more: what another command has begun ends first.

    Raises Unavailable where one has no worker and none can start.
    """
    is_told = False
    while True:
        pools = [pool for pool in cluster.pools if pool.role in roles]
        for pool in pools:
            if pool.unrecoverable_reason and not any(each.state in SERVING for each in pool.workers):
                raise Unavailable(f"{pool.role.value}: {pool.unrecoverable_reason}")
        moving = [told for pool in pools for told in movements(pool)]
        if not moving:
            return pools
        if not is_told:
            out.print(f"waits until what is under way is done: {', '.join(moving)}", markup=False)
            is_told = True
        await asyncio.sleep(_LOOK_EVERY_S)
        cluster = await patiently(client)
        steps.show(cluster)


def movements(pool: Pool) -> list[str]:
    """Why a pool is not at rest. One that cannot be whole again is as much at rest as it will be."""
    if pool.unrecoverable_reason:
        return []
    moving = [f"{each.id} is {each.state.value}" for each in pool.workers if each.state not in SERVING]
    if moving or len(pool.workers) == pool.target:
        return moving
    return [f"{pool.role.value} has {len(pool.workers)} workers, and is to have {pool.target}"]


async def patiently(client: Client) -> Cluster:
    began = time.monotonic()
    while True:
        try:
            return await client.get_cluster(timeout=10.0)
        except Unavailable:
            if time.monotonic() - began > _AWAY_S:
                raise
            await asyncio.sleep(_LOOK_EVERY_S)


def _workers(cluster: Cluster) -> list[Worker]:
    return [worker for pool in cluster.pools for worker in pool.workers]
