"""`Control`: what routers watch, and what they pass on for `Admin`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import NoReturn, Protocol, cast

import grpc

from cluster.config import MAX_WORKERS
from cluster.control.membership import Membership
from cluster.control.snapshot import ROLES
from cluster.control.supervisor import Supervisor
from pdserve.v1 import cluster_pb2, cluster_pb2_grpc
from pdserve.v1.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PdserveError,
    Unavailable,
    to_status,
)
from worker.identity import Role

_ROLE_OF = {number: role for role, number in ROLES.items()}
# How long `GetCluster` waits for the workers' fresh counters.
_REFRESH_TIMEOUT_S = 0.5
# Snapshots kept for a watcher that reads slowly; each is whole, so the oldest may go.
_MAX_UNREAD = 256


class _Abortable(Protocol):
    """What grpc-stubs leave out of grpc.aio.ServicerContext."""

    async def abort_with_status(self, status: grpc.Status) -> NoReturn: ...


class Watchers:
    """Everybody who has `Watch` open. Each sees every version, in order, while it keeps up."""

    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[cluster_pb2.ClusterSnapshot]] = set()

    def tell(self, snapshot: cluster_pb2.ClusterSnapshot) -> None:
        for queue in self._queues:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(snapshot)

    async def follow(self, first: cluster_pb2.ClusterSnapshot) -> AsyncIterator[cluster_pb2.ClusterSnapshot]:
        queue: asyncio.Queue[cluster_pb2.ClusterSnapshot] = asyncio.Queue(_MAX_UNREAD)
        self._queues.add(queue)
        try:
            yield first
            while True:
                yield await queue.get()
        finally:
            self._queues.discard(queue)


class ControlService(cluster_pb2_grpc.ControlServicer):
    def __init__(
        self,
        membership: Membership,
        supervisor: Supervisor,
        watchers: Watchers,
        snapshot: Callable[[], cluster_pb2.ClusterSnapshot],
        on_targets: Callable[[], None],
        routers: Mapping[str, Callable[[float], Awaitable[None]]] = MappingProxyType({}),
    ) -> None:
        """`routers`: what restarts each, and is told how long the one before may drain."""
        self._membership = membership
        self._supervisor = supervisor
        self._watchers = watchers
        self._snapshot = snapshot
        self._on_targets = on_targets
        self._routers = routers

    async def Watch(
        self, request: cluster_pb2.WatchRequest, context: object
    ) -> AsyncIterator[cluster_pb2.ClusterSnapshot]:
        async for snapshot in self._watchers.follow(self._snapshot()):
            yield snapshot

    async def GetCluster(
        self, request: cluster_pb2.GetClusterRequest, context: object
    ) -> cluster_pb2.ClusterSnapshot:
        await self._supervisor.refresh(_REFRESH_TIMEOUT_S)
        return self._snapshot()

    async def ScalePool(
        self, request: cluster_pb2.ScalePoolRequest, context: object
    ) -> cluster_pb2.ClusterSnapshot:
        role = _ROLE_OF.get(request.role)
        if role is None:
            await _abort(context, InvalidArgument("role: name prefill, decode or colocated"))
        if role not in self._membership.pools:
            await _abort(context, NotFound(f"this cluster has no {role.value} pool", reason="NO_POOL"))
        if request.target > MAX_WORKERS:
            message = f"target: {request.target} is over the limit of {MAX_WORKERS} workers in a pool"
            await _abort(context, InvalidArgument(message))
        try:
            self._set_target(role, request.target)
        except PdserveError as error:
            await _abort(context, error)
        self._supervisor.reconcile()
        return self._snapshot()

    async def DrainWorker(
        self, request: cluster_pb2.DrainWorkerRequest, context: object
    ) -> cluster_pb2.ClusterSnapshot:
        member = self._membership.find(request.worker_id)
        if member is None:
            await _abort(context, NotFound(f"there is no worker {request.worker_id!r}", reason="NO_WORKER"))
        if not member.can_drain:
            message = f"{member.worker_id} is {member.state.value}: only a ready worker can be drained"
            await _abort(context, FailedPrecondition(message, reason="NOT_READY"))
        timeout_s = request.timeout_ms / 1000 if request.timeout_ms else None
        pool = self._membership.pools[member.role]
        stays = request.replace or request.replace_first
        try:
            self._set_target(member.role, pool.target if stays else max(0, pool.target - 1))
        except PdserveError as error:
            await _abort(context, error)
        if request.replace_first:
            self._supervisor.replace(member, timeout_s)
        else:
            self._supervisor.drain(member, timeout_s)
        self._supervisor.reconcile()
        return self._snapshot()

    async def RestartRouter(
        self, request: cluster_pb2.RestartRouterRequest, context: object
    ) -> cluster_pb2.ClusterSnapshot:
        restart = self._routers.get(request.router_id)
        if restart is None:
            message = f"there is no router {request.router_id!r}"
            await _abort(context, NotFound(message, reason="NO_ROUTER"))
        try:
            await restart(request.timeout_ms / 1000)
        except PdserveError as error:
            await _abort(context, error)
        return self._snapshot()

    def _set_target(self, role: Role, target: int) -> None:
        """Raises Unavailable where it cannot be kept for the next controller: then all is as before."""
        before = self._membership.pools[role].target
        self._membership.set_target(role, target)
        try:
            self._on_targets()
        except OSError as error:
            self._membership.set_target(role, before)
            message = f"the target of {role.value} cannot be written down: {error}"
            raise Unavailable(message, reason="CANNOT_KEEP_TARGETS") from error


async def _abort(context: object, error: PdserveError) -> NoReturn:
    await cast(_Abortable, context).abort_with_status(to_status(error))
    raise error
