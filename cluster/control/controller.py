"""The controller: a Ray actor on the node where `up` ran. It owns the cluster's membership.

Takes no CPU of Ray's count and is never restarted by Ray: a router's actor makes another one. It starts the
workers, so they are its to watch; they are detached actors with names, and the targets are in a file, so that
they outlive it, and the next one adopts them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from functools import partial
from pathlib import Path

from cluster.actors.actor_process import die_with_parent, log_to
from cluster.actors.guard import Guard
from cluster.actors.named import workers_of
from cluster.actors.ray_worker import RayWorker
from cluster.actors.router_actor import find_router
from cluster.config import ClusterConfig
from cluster.control.control_service import ControlService, Watchers
from cluster.control.membership import Membership
from cluster.control.snapshot import cluster_snapshot
from cluster.control.supervisor import Supervisor
from cluster.control.tasks import Once, Tasks
from cluster.nodes.network import LOOPBACK, Bind
from cluster.state import control_file, write_whole
from cluster.trusted import trust_files
from pdserve.v1 import cluster_pb2, cluster_pb2_grpc
from trust.servers import listen, make_aio_server
from worker.identity import Role

log = logging.getLogger(__name__)

# For the workers that an earlier controller has left to say how they are. Routers wait for it.
_ADOPTION_S = 10.0


class Controller:
    """`folder`: the cluster's own, on this node (see cluster.state)."""

    def __init__(self, config: ClusterConfig, folder: str, bind: Bind) -> None:
        die_with_parent()
        logs = str(Path(folder) / "logs")
        log_to(logs, "controller", config.observability)
        self._config = config
        self._targets_file = Path(folder) / "targets.json"
        self._control_file = control_file(Path(folder))
        self._starting = Once(self._start)
        self._tasks = Tasks()
        self._routers = [
            Guard(f"router-{index}", partial(find_router, config, folder, bind, index), self._note_routers)
            for index in range(config.router.replicas)
        ]
        self._watchers = Watchers()
        self._membership = Membership(self._read_targets(), self._tell)
        self._trust = trust_files(config, Path(folder)).read()
        launch = partial(RayWorker, self._trust)
        self._supervisor = Supervisor(config, self._membership, launch, self._trust, logs, bind=bind)
        self._server = make_aio_server(self._trust)

    async def start(self) -> str:
        """Serves Control, and returns host:port. Asked again it is the same."""
        return await self._starting.done()

    async def _start(self) -> str:
        """Adopts what runs; then the workers that are missing begin to start, and the routers.

        On loopback, wherever the workers are: only routers and commands speak to it, and they are on this
        node. Who shows the cluster's secret may scale and drain.
        """
        found = await asyncio.to_thread(workers_of, self._config.name)
        adopted = {what: partial(RayWorker, self._trust, actor=actor) for what, actor in found.items()}
        await self._supervisor.adopt(adopted, _ADOPTION_S)
        routers = {f"router-{index}": guard.restart for index, guard in enumerate(self._routers)}
        service = ControlService(
            self._membership, self._supervisor, self._watchers, self._snapshot, self._write_targets, routers
        )
        cluster_pb2_grpc.add_ControlServicer_to_server(service, self._server)
        port = listen(self._server, f"{LOOPBACK}:0", self._trust)
        # A disk may be full. Before the server begins, since it takes no other port afterwards: then all this
        # can be done anew.
        self._write_targets()
        write_whole(self._control_file, json.dumps({"address": f"{LOOPBACK}:{port}"}))
        await self._server.start()
        self._supervisor.start()
        for guard in self._routers:
            self._tasks.repeat(guard.keep, "guard of a router")
        log.info("controller of %s serves %s:%d", self._config.name, LOOPBACK, port)
        return f"{LOOPBACK}:{port}"

    async def ping(self) -> int:
        return os.getpid()

    async def rest(self) -> None:
        """Starts no router any more: the cluster ends."""
        await self._tasks.close()

    async def stop(self) -> None:
        """Stops deciding, so that what ends from now on stays ended."""
        await self.rest()
        await self._supervisor.close()
        await self._server.stop(0)

    def _snapshot(self) -> cluster_pb2.ClusterSnapshot:
        return cluster_snapshot(self._config, self._membership, [guard.state for guard in self._routers])

    def _note_routers(self) -> None:
        self._membership.note_change()

    def _tell(self) -> None:
        self._watchers.tell(self._snapshot())

    def _read_targets(self) -> dict[Role, int]:
        """What was last asked for; of a new cluster, what its configuration says."""
        targets = {role: pool.replicas for role, pool in self._config.pools.by_role().items()}
        if self._targets_file.exists():
            saved: dict[str, int] = json.loads(self._targets_file.read_text(encoding="utf-8"))
            targets.update({role: saved[role.value] for role in targets if role.value in saved})
        return targets

    def _write_targets(self) -> None:
        targets = {role.value: pool.target for role, pool in self._membership.pools.items()}
        write_whole(self._targets_file, json.dumps(targets))
