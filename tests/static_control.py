"""A controller for tests without Ray: serves a snapshot, and every later one that it is given."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import grpc

from pdserve.v1 import cluster_pb2, cluster_pb2_grpc
from pdserve.v1.errors import NotFound, to_status
from trust.servers import listen, make_aio_server
from trust.trust import Trust


class StaticControl(cluster_pb2_grpc.ControlServicer):
    """`async with StaticControl() as control`, then `control.show(pools)` as often as wanted. Without `trust`
    whoever asks is answered."""

    def __init__(self, name: str = "test", model: str = "tiny", trust: Trust | None = None) -> None:
        self._trust = trust
        self.snapshot = cluster_pb2.ClusterSnapshot(name=name, model=model, version=1)
        self.address = ""
        self.scaled: list[tuple[int, int]] = []
        self.drained: list[str] = []
        self.num_watches = 0
        self._changed = asyncio.Condition()
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> StaticControl:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Again at its old address, after a `stop`."""
        address, trust = self.address or "127.0.0.1:0", self._trust
        self._server = grpc.aio.server() if trust is None else make_aio_server(trust)
        cluster_pb2_grpc.add_ControlServicer_to_server(self, self._server)
        if trust is None:
            port = self._server.add_insecure_port(address)
        else:
            port = listen(self._server, address, trust)
        self.address = f"127.0.0.1:{port}"
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def show(self, pools: Sequence[cluster_pb2.PoolStatus]) -> None:
        async with self._changed:
            fresh = cluster_pb2.ClusterSnapshot(pools=pools)
            fresh.name, fresh.model = self.snapshot.name, self.snapshot.model
            fresh.version = self.snapshot.version + 1
            self.snapshot = fresh
            self._changed.notify_all()

    async def Watch(
        self, request: cluster_pb2.WatchRequest, context: object
    ) -> AsyncIterator[cluster_pb2.ClusterSnapshot]:
        self.num_watches += 1
        seen = 0
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self.snapshot.version > seen)  # noqa: B023
                snapshot, seen = self.snapshot, self.snapshot.version
            yield snapshot

    async def GetCluster(
        self, request: cluster_pb2.GetClusterRequest, context: object
    ) -> cluster_pb2.ClusterSnapshot:
        return self.snapshot

    async def ScalePool(
        self, request: cluster_pb2.ScalePoolRequest, context: object
    ) -> cluster_pb2.ClusterSnapshot:
        self.scaled.append((request.role, request.target))
        return self.snapshot

    async def DrainWorker(
        self,
        request: cluster_pb2.DrainWorkerRequest,
        context: grpc.aio.ServicerContext[cluster_pb2.DrainWorkerRequest, cluster_pb2.ClusterSnapshot],
    ) -> cluster_pb2.ClusterSnapshot:
        names = [worker.id for pool in self.snapshot.pools for worker in pool.workers]
        if request.worker_id not in names:
            status = to_status(NotFound(f"no worker {request.worker_id}"))
            await context.abort(status.code, status.details, status.trailing_metadata)
        self.drained.append(request.worker_id)
        return self.snapshot
