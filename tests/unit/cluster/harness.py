"""A supervisor on scripted workers: what a controller is, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from cluster.config import ClusterConfig
from cluster.config_file import parse_config
from cluster.control.health import Patience
from cluster.control.membership import Membership, WorkerState
from cluster.control.supervisor import Supervisor
from tests.trusted import TRUST
from tests.unit.cluster.scripted_handles import Script
from worker.identity import Role

S = WorkerState
QUICK = Patience(
    probe_every_s=0.02,
    probe_timeout_s=0.05,
    unhealthy_after_s=0.15,
    dead_after_silent_s=0.4,
    dead_after_steps=10.0,
    dead_after_s=0.6,
    quarantine_s=0.4,
    register_timeout_s=1.0,
)


def config(prefill: int, decode: int, start_timeout_s: float = 5.0) -> ClusterConfig:
    return parse_config(
        f"name: test\npools:\n"
        f"  prefill: {{replicas: {prefill}, start_timeout_s: {start_timeout_s}}}\n"
        f"  decode: {{replicas: {decode}, start_timeout_s: {start_timeout_s}}}\n",
        "test",
    )


@dataclass
class Cluster:
    """What a test plays with. `changed` fires after every change of the books."""

    script: Script
    membership: Membership
    supervisor: Supervisor
    changed: asyncio.Condition
    # What a controller would do of its own after a change.
    on_change: Callable[[], None] | None = None

    def states(self) -> dict[str, S]:
        return {member.worker_id: member.state for member in self.membership.members()}

    async def until(self, states: dict[str, S]) -> None:
        async with self.changed:
            await asyncio.wait_for(self.changed.wait_for(lambda: self.states() == states), 5.0)

    def scale(self, role: Role, target: int) -> None:
        self.membership.set_target(role, target)
        self.supervisor.reconcile()


def cluster_of(wanted: ClusterConfig, script: Script) -> Cluster:
    """Its supervisor has not begun."""
    changed = asyncio.Condition()
    tellers: set[asyncio.Task[None]] = set()

    async def tell() -> None:
        async with changed:
            changed.notify_all()

    def on_change() -> None:
        if cluster.on_change is not None:
            cluster.on_change()
        task = asyncio.ensure_future(tell())
        tellers.add(task)
        task.add_done_callback(tellers.discard)

    targets = {role: pool.replicas for role, pool in wanted.pools.by_role().items()}
    membership = Membership(targets, on_change)
    supervisor = Supervisor(wanted, membership, script.launch, TRUST, patience=QUICK)
    cluster = Cluster(script, membership, supervisor, changed)
    return cluster


class started:
    """`async with started(config) as cluster`: the supervisor runs; no worker may be ready yet."""

    def __init__(self, wanted: ClusterConfig) -> None:
        self._config = wanted

    async def __aenter__(self) -> Cluster:
        self._cluster = cluster_of(self._config, Script())
        self._cluster.supervisor.start()
        return self._cluster

    async def __aexit__(self, *_: object) -> None:
        await self._cluster.supervisor.close()
        for handle in self._cluster.script.handles:
            await handle.close()
        assert self._cluster.script.living() == []
