"""The decode role on an engine: blocks are reserved, KV comes in, tokens go out. A colocated worker is one
that runs prompts as well. Here its life; `sequences.py` has what it lets in.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from decode_worker.admission import Mode
from decode_worker.config import DecodeConfig
from decode_worker.sequences import Sequences
from decode_worker.service import DecodeServicer
from decode_worker.subscription import Subscription
from engine.grammar import Grammar
from engine.loop import EngineLoop
from engine.request import SequenceRequest, StepResult
from kv_transfer.frame import TransferKey
from kv_transfer.transfer import PushTarget
from kv_transfer.transport.base import FrameSink, PushEndpoint
from kv_transfer.transport.grpc import GrpcPushServer
from observability.origin import Origin
from observability.tracing import NO_TRACER, Tracer
from pdserve.v1 import cluster_pb2, worker_pb2, worker_pb2_grpc
from pdserve.v1.errors import Internal, PdserveError, Unavailable
from trust.errors import TrustError
from trust.trust import Trust
from worker.control_server import ControlServer
from worker.grammars import grammar_of
from worker.heartbeat import Heartbeat
from worker.identity import Role, WorkerIdentity, WorkerState
from worker.messages import worker_load
from worker.metrics import WorkerMetrics
from worker.record import Recorder
from worker.status import engine_counters, quarantine_messages, transfer_counters, worker_status

log = logging.getLogger(__name__)


class DecodeWorker:
    """A shell on an engine that outlives it: `stop` leaves the engine as `start` found it.

    `trust`: who may call it. `endpoint` makes the end that KV is pushed to; by default a gRPC server beside
    the control server. `tracer` is closed by `stop`.
    """

    def __init__(
        self,
        worker_id: str,
        loop: EngineLoop,
        trust: Trust,
        host: str = "127.0.0.1",
        port: int = 0,
        role: Role = Role.DECODE,
        config: DecodeConfig | None = None,
        endpoint: Callable[[FrameSink], PushEndpoint] | None = None,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self.identity = WorkerIdentity(worker_id, role)
        self.state = WorkerState.READY
        self._config = config or DecodeConfig()
        self._loop = loop
        self._trust = trust
        self._host = host
        self._make_endpoint = endpoint or self._grpc_endpoint
        self._endpoint: PushEndpoint | None = None
        self._metrics = WorkerMetrics(self.describe)
        self._recorder = Recorder(worker_id, tracer)
        heartbeat = Heartbeat(worker_id, loop.engine.progress)
        self._server = ControlServer(trust, host, port, self.describe, self._metrics, heartbeat)
        self._sequences = Sequences(self.identity, loop, self._config, self._recorder, self._require_ready)
        self._intake = self._sequences.intake
        self._lease_watch: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        return self._server.address

    # -- life --------------------------------------------------------------------------------------

    async def start(self) -> str:
        """Serves; returns the address. Raises RuntimeError where a port is taken, and TrustError."""
        self._asyncio = asyncio.get_running_loop()
        self._endpoint = self._make_endpoint(self._intake.receiver)
        self._sequences.begin(self._endpoint)
        worker_pb2_grpc.add_DecodeWorkerServicer_to_server(DecodeServicer(self), self._server.server)
        await asyncio.wrap_future(self._loop.set_listener(self._on_step))
        self._loop.on_failure = self._on_engine_failure
        try:
            await self._server.start()
        except (RuntimeError, TrustError):
            self._endpoint.stop()
            await asyncio.wrap_future(self._loop.set_listener(None))
            raise
        self._endpoint.start()
        self._lease_watch = asyncio.create_task(self._sequences.watch_leases(), name="leases")
        self._lease_watch.add_done_callback(self._on_lease_watch_over)
        role = self.identity.role.value
        log.info("serving worker=%s role=%s address=%s", self.identity.worker_id, role, self.address)
        return self.address

    async def drain(self) -> None:
        """Refuses new sequences; returns when all admitted ones have ended."""
        if self.state is WorkerState.READY:
            self.state = WorkerState.DRAINING
        await self._server.set_serving(False)
        await self._sequences.wait_until_empty()

    async def stop(self) -> None:
        """Ends everything with a typed status, in bounded time. Idempotent."""
        if self.state is WorkerState.STOPPED:
            return
        self.state = WorkerState.STOPPED
        self._sequences.end_all(Unavailable(f"{self.identity.worker_id} stops", reason="STOPPING"))
        if self._endpoint is not None:
            # With the last KV thread gone, only what a sender's own process might write is in quarantine.
            await asyncio.to_thread(self._endpoint.stop)
        await self._server.stop(self._config.stop_grace_s)
        if self._lease_watch is not None:
            self._lease_watch.cancel()
            await asyncio.wait([self._lease_watch])
        self._loop.on_failure = None
        if self._loop.failure is None:
            await asyncio.wrap_future(self._loop.set_listener(None))
        await self._recorder.close()

    def describe(self) -> cluster_pb2.WorkerStatus:
        counters = engine_counters(self._sequences.load)
        counters.kv_bytes_received = self._intake.table.bytes_received
        counters.num_expired_leases = self._intake.table.num_expired_leases
        counters.transfers.extend(transfer_counters(self._intake.table.counters))
        failure = self._loop.failure
        detail = "" if failure is None else f"the engine failed: {failure}"
        status = worker_status(
            self.identity, self.state, detail, self.address, self._loop.engine, self.load(), counters
        )
        status.quarantines.extend(quarantine_messages(self._intake.table.quarantines()))
        return status

    def load(self) -> cluster_pb2.WorkerLoad:
        return worker_load(self._sequences.load, num_reservations=self._intake.table.num_reservations)

    def check_integrity(self) -> None:
        self._intake.table.check_integrity()

    # -- what a router asks ------------------------------------------------------------------------

    async def grammar(self, spec: worker_pb2.SequenceSpec) -> Grammar | None:
        return await grammar_of(self._loop.engine.grammars, spec)

    async def reserve(
        self, key: TransferKey, router_id: str, request: SequenceRequest, mode: Mode, origin: Origin
    ) -> PushTarget | None:
        return await self._sequences.reserve(key, router_id, request, mode, origin)

    def release(self, keys: Sequence[TransferKey]) -> int:
        return self._sequences.release(keys)

    def subscribe(self, router_id: str) -> Subscription:
        return self._sequences.subscribe(router_id)

    def unsubscribe(self, subscription: Subscription) -> None:
        self._sequences.unsubscribe(subscription)

    def _require_ready(self) -> None:
        if self.state is not WorkerState.READY:
            message = f"{self.identity.worker_id} is {self.state.value}"
            raise Unavailable(message, reason=self.state.name, retry_after_s=0.0)

    # -- what goes wrong, and steps ------------------------------------------------------------------

    def _on_lease_watch_over(self, watch: asyncio.Task[None]) -> None:
        if not watch.cancelled():  # it never ends by itself
            log.critical("the lease watch failed", exc_info=watch.exception())
            self._fail(Internal("the lease watch failed"))

    def _on_step(self, result: StepResult) -> None:
        """On the engine's thread."""
        self._sequences.stepped(result)
        self._metrics.note_step(result)

    def _on_engine_failure(self, error: BaseException) -> None:
        self._asyncio.call_soon_threadsafe(self._fail, Unavailable(f"the engine failed: {error}"))

    def _fail(self, error: PdserveError) -> None:
        if self.state is not WorkerState.STOPPED:
            self.state = WorkerState.FAILED
            self._sequences.end_all(error)

    def _grpc_endpoint(self, sink: FrameSink) -> PushEndpoint:
        return GrpcPushServer(
            sink, self._trust, self._host, self._config.kv_port, self._loop.engine.layout.block_bytes
        )
