"""Membership as the protobuf that routers and `status` read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.config import ClusterConfig
from cluster.control.membership import Member, Membership, Pool, WorkerState
from pdserve.v1 import cluster_pb2
from worker.identity import Role

ROLES = {
    Role.PREFILL: cluster_pb2.ROLE_PREFILL,
    Role.DECODE: cluster_pb2.ROLE_DECODE,
    Role.COLOCATED: cluster_pb2.ROLE_COLOCATED,
}
_STATES = {
    WorkerState.STARTING: cluster_pb2.WORKER_STATE_STARTING,
    WorkerState.READY: cluster_pb2.WORKER_STATE_READY,
    WorkerState.UNHEALTHY: cluster_pb2.WORKER_STATE_UNHEALTHY,
    WorkerState.DRAINING: cluster_pb2.WORKER_STATE_DRAINING,
    WorkerState.STOPPED: cluster_pb2.WORKER_STATE_STOPPED,
    WorkerState.DEAD: cluster_pb2.WORKER_STATE_DEAD,
}


@dataclass(frozen=True, slots=True)
class PartState:
    """What is known of a router or the controller by who guards it."""

    # Why none is there; empty: one is.
    trouble: str = "has not started yet"
    pid: int | None = None


def cluster_snapshot(
    config: ClusterConfig, membership: Membership, routers: Sequence[PartState] = ()
) -> cluster_pb2.ClusterSnapshot:
    return cluster_pb2.ClusterSnapshot(
        name=config.name,
        version=membership.version,
        model=config.model.id,
        pools=[_pool(pool) for pool in membership.pools.values()],
        router_grpc=config.router.grpc,
        router_http=config.router.http or "",
        router_tls=config.router.tls is not None,
        routers=[_router(config, index, state) for index, state in enumerate(routers)],
    )


def _router(config: ClusterConfig, index: int, state: PartState) -> cluster_pb2.RouterStatus:
    served = config.router.replica(index)
    return cluster_pb2.RouterStatus(
        id=f"router-{index}",
        grpc=served.grpc,
        http=served.http or "",
        detail=state.trouble,
        pid=state.pid or 0,
    )


def _pool(pool: Pool) -> cluster_pb2.PoolStatus:
    return cluster_pb2.PoolStatus(
        role=ROLES[pool.role],
        target=pool.target,
        workers=[_worker(member) for member in pool.members],
        unrecoverable_reason=pool.unrecoverable_reason,
    )


def _worker(member: Member) -> cluster_pb2.WorkerStatus:
    """What the worker said of itself, under the controller's word on its state."""
    status = cluster_pb2.WorkerStatus()
    if member.report is not None:
        status.CopyFrom(member.report)
    status.id = member.worker_id
    status.role = ROLES[member.role]
    status.state = _STATES[member.state]
    status.detail = member.detail
    status.address = member.address or ""
    status.pid = member.pid or 0
    status.node = status.node or member.node
    return status
