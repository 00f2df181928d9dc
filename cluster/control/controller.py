"""The controller: a Ray actor on the node where `up` ran. It owns the cluster's membership.

Takes no CPU of Ray's count and is never restarted by Ray. It starts the workers, so they are its to watch;
they are detached actors with names, and the targets are in a file, so that they outlive it.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import grpc

from cluster.actors.actor_process import die_with_parent, log_to
from cluster.actors.ray_worker import RayWorker
from cluster.config import ClusterConfig
from cluster.control.control_service import ControlService, Watchers
from cluster.control.membership import Membership
from cluster.control.snapshot import cluster_snapshot
from cluster.control.supervisor import Supervisor
from cluster.nodes.network import LOOPBACK, Bind
from cluster.state import write_whole
from pdserve.v1 import cluster_pb2, cluster_pb2_grpc
from worker.identity import Role

log = logging.getLogger(__name__)


class Controller:
    """`folder`: the cluster's own, on this node (see cluster.state)."""

    def __init__(self, config: ClusterConfig, folder: str, bind: Bind) -> None:
        die_with_parent()
        logs = str(Path(folder) / "logs")
        log_to(logs, "controller", config.observability)
        self._config = config
        self._targets_file = Path(folder) / "targets.json"
        self._watchers = Watchers()
        self._membership = Membership(self._read_targets(), self._tell)
        self._supervisor = Supervisor(config, self._membership, RayWorker, logs, bind=bind)
        self._server = grpc.aio.server()

    async def start(self) -> str:
        """Serves Control, and returns host:port. The workers begin to start.

        On loopback, wherever the workers are: only routers and commands speak to it, and they are on this
        node. Whoever reaches it may scale and drain.
        """
        service = ControlService(
            self._membership, self._supervisor, self._watchers, self._snapshot, self._write_targets
        )
        cluster_pb2_grpc.add_ControlServicer_to_server(service, self._server)
        port = self._server.add_insecure_port(f"{LOOPBACK}:0")
        await self._server.start()
        self._write_targets()
        self._supervisor.start()
        log.info("controller of %s serves %s:%d", self._config.name, LOOPBACK, port)
        return f"{LOOPBACK}:{port}"

    async def stop(self) -> None:
        """Stops deciding, so that what ends from now on stays ended."""
        await self._supervisor.close()
        await self._server.stop(0)

    def _snapshot(self) -> cluster_pb2.ClusterSnapshot:
        return cluster_snapshot(self._config, self._membership)

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
