"""The grpc.aio server of a worker: its role's service, Describe, Watch, Metrics, and health."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from pdserve.v1 import cluster_pb2, worker_pb2, worker_pb2_grpc
from trust.servers import listen, make_aio_server
from trust.trust import Trust
from worker.heartbeat import Heartbeat
from worker.metrics import WorkerMetrics
from worker.statuses import Writer

_OPTIONS = [
    # A taken port is an error, not a second listener.
    ("grpc.so_reuseport", 0),
    # A prompt of the longest context is more than the default of 4 MiB can always hold.
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    # Routers ping every few seconds, to see a stopped process.
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
]
_VITALS_EVERY_S = 1.0


class ControlServer:
    def __init__(
        self,
        trust: Trust,
        host: str,
        port: int,
        describe: Callable[[], cluster_pb2.WorkerStatus],
        metrics: WorkerMetrics,
        heartbeat: Heartbeat,
    ) -> None:
        self._trust = trust
        self._host = host
        self._port = port
        self._heartbeat = heartbeat
        self._health = HealthServicer()
        self._worker = _WorkerServicer(describe, metrics, heartbeat)
        self.server = make_aio_server(trust, _OPTIONS)
        worker_pb2_grpc.add_WorkerServicer_to_server(self._worker, self.server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)

    @property
    def address(self) -> str:
        return f"{self._host}:{self._port}"

    async def start(self) -> None:
        """Raises RuntimeError, which names the address, where the port is taken, and TrustError."""
        self._port = listen(self.server, f"{self._host}:{self._port}", self._trust)
        await self.server.start()
        self._heartbeat.start()
        await self.set_serving(True)

    async def set_serving(self, is_serving: bool) -> None:
        answer = health_pb2.HealthCheckResponse
        await self._health.set("", answer.SERVING if is_serving else answer.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Calls in flight have `grace_s` to end by themselves."""
        await self._health.enter_graceful_shutdown()
        self._worker.is_ending.set()
        await self.server.stop(grace_s)
        await asyncio.to_thread(self._heartbeat.stop)


class _WorkerServicer(worker_pb2_grpc.WorkerServicer):
    def __init__(
        self, describe: Callable[[], cluster_pb2.WorkerStatus], metrics: WorkerMetrics, heartbeat: Heartbeat
    ) -> None:
        self._describe = describe
        self._metrics = metrics
        self._heartbeat = heartbeat
        self.is_ending = asyncio.Event()

    async def Describe(
        self, request: worker_pb2.DescribeRequest, context: object
    ) -> worker_pb2.DescribeResponse:
        status = self._describe()
        status.vitals.CopyFrom(self._heartbeat.vitals())
        return worker_pb2.DescribeResponse(status=status)

    async def Watch(  # type: ignore[override]  # the stubs know only handlers that yield
        self, request: worker_pb2.WatchVitalsRequest, context: Writer[cluster_pb2.Vitals]
    ) -> None:
        while not self.is_ending.is_set():
            await context.write(self._heartbeat.vitals())
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.is_ending.wait(), _VITALS_EVERY_S)

    async def Metrics(
        self, request: worker_pb2.MetricsRequest, context: object
    ) -> worker_pb2.MetricsResponse:
        return worker_pb2.MetricsResponse(exposition=self._metrics.exposition())
