"""What is done to a cluster while it serves. Workers are killed and stopped by pid, pools scaled by Admin."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from contextlib import suppress
from dataclasses import dataclass

from pdserve.client import Client, PdserveError, Role, Worker, WorkerState

# How long a pool may take to be whole again: a worker loads its model on a busy machine.
WHOLE_AGAIN_S = 300.0
_LOOK_S = 0.2
_GOING = (WorkerState.STOPPED, WorkerState.DEAD)


class NotWhole(Exception):
    """A pool did not come back to its target."""


@dataclass(frozen=True, slots=True)
class Trouble:
    what: str
    # Monotonic seconds.
    at: float
    # Until the pool had all its workers ready again.
    whole_again_s: float


class Cluster:
    """One that `pdserve up` started on this machine."""

    def __init__(self, client: Client, dice: random.Random) -> None:
        self._client = client
        self._dice = dice

    async def workers(self, role: Role | None = None) -> list[Worker]:
        cluster = await self._client.get_cluster(timeout=10.0)
        pools = [pool for pool in cluster.pools if role in (None, pool.role)]
        return [worker for pool in pools for worker in pool.workers if worker.state not in _GOING]

    async def kill(self, role: Role) -> Trouble:
        return await self._signal(role, signal.SIGKILL, "killed")

    async def stop(self, role: Role) -> Trouble:
        """For good: nothing but a kill ends it."""
        return await self._signal(role, signal.SIGSTOP, "stopped")

    async def drain(self, role: Role) -> Trouble:
        """The one with most to do, which another replaces."""
        victim = await self._busiest(role)
        at = time.monotonic()
        num_ready = len(await self.workers(role))
        await self._client.drain_worker(victim.id, replace=True, timeout=10.0)
        await self.whole({role: num_ready}, gone={victim.instance_id})
        return Trouble(f"{victim.id} drained", at, time.monotonic() - at)

    async def scale(self, role: Role, target: int) -> Trouble:
        at = time.monotonic()
        await self._client.scale_pool(role, target, timeout=10.0)
        await self.whole({role: target}, gone=set())
        return Trouble(f"{role.value} scaled to {target}", at, time.monotonic() - at)

    async def whole(self, targets: dict[Role, int], gone: set[str]) -> None:
        """Until so many are ready, none of them a process that is `gone`. Raises NotWhole."""
        deadline = time.monotonic() + WHOLE_AGAIN_S
        while time.monotonic() < deadline:
            with suppress(PdserveError):
                workers = await self.workers()
                if all(_are_ready(workers, role, target, gone) for role, target in targets.items()):
                    return
            await asyncio.sleep(_LOOK_S)
        raise NotWhole(f"after {WHOLE_AGAIN_S:.0f} s there are not {targets} workers ready")

    async def _signal(self, role: Role, number: signal.Signals, word: str) -> Trouble:
        victim = await self._busiest(role)
        num_ready = len(await self.workers(role))
        at = time.monotonic()
        os.kill(victim.pid, number)
        await self.whole({role: num_ready}, gone={victim.instance_id})
        return Trouble(f"{victim.id} {word}", at, time.monotonic() - at)

    async def _busiest(self, role: Role) -> Worker:
        ready = [worker for worker in await self.workers(role) if worker.state is WorkerState.READY]
        return max(ready, key=lambda worker: (worker.load.num_running, self._dice.random()))


def _are_ready(workers: list[Worker], role: Role, target: int, gone: set[str]) -> bool:
    there = [worker for worker in workers if worker.role is role and worker.instance_id not in gone]
    ready = [worker for worker in there if worker.state is WorkerState.READY]
    return len(ready) == len(there) == target
