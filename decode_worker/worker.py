"""The decode role on an engine: blocks are reserved, KV comes in, tokens go out. A colocated worker is one
that runs prompts as well.

The asyncio loop owns all tables of this file; the engine's thread and the KV threads only post to it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from decode_worker.admission import Admission, Admissions, Mode, Released
from decode_worker.config import DecodeConfig
from decode_worker.intake import Intake
from decode_worker.publisher import Publisher
from decode_worker.record import DecodeRecord
from decode_worker.service import DecodeServicer
from decode_worker.step_output import step_batches
from decode_worker.subscription import StepBatch, StepToken, Subscription
from engine.engine import Engine
from engine.errors import EngineError
from engine.grammar import Grammar
from engine.loop import EngineLoop
from engine.request import EngineLoad, NewToken, SequenceRequest, StepResult
from kv_transfer.frame import TransferKey
from kv_transfer.handover import HandOver, HandOvers
from kv_transfer.reservation import Reservation
from kv_transfer.transfer import PushTarget
from kv_transfer.transport.base import FrameSink, PushEndpoint
from kv_transfer.transport.grpc import GrpcPushServer
from observability.origin import Origin
from observability.tracing import NO_TRACER, Tracer
from pdserve.v1 import cluster_pb2, worker_pb2, worker_pb2_grpc
from pdserve.v1.errors import (
    Aborted,
    FailedPrecondition,
    Internal,
    PdserveError,
    ResourceExhausted,
    Unavailable,
)
from worker.control_server import ControlServer
from worker.engine_calls import post_to_engine, run_on_engine
from worker.grammars import grammar_of
from worker.identity import Role, WorkerIdentity, WorkerState
from worker.messages import worker_load
from worker.metrics import WorkerMetrics
from worker.record import Recorder
from worker.status import engine_counters, quarantine_messages, transfer_counters, worker_status
from worker.statuses import RETRY_AFTER_S, failure, typed

log = logging.getLogger(__name__)


class DecodeWorker:
    """A shell on an engine that outlives it: `stop` leaves the engine as `start` found it.

    `endpoint` makes the end that KV is pushed to; by default a gRPC server beside the control server.
    `tracer` is closed by `stop`.
    """

    def __init__(
        self,
        worker_id: str,
        loop: EngineLoop,
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
        self._host = host
        self._make_endpoint = endpoint or self._grpc_endpoint
        self._endpoint: PushEndpoint | None = None
        self.intake = Intake(loop, self.identity.instance_id, self, self._config.verify)
        self._metrics = WorkerMetrics(self.describe)
        self._recorder = Recorder(worker_id, tracer)
        self._server = ControlServer(host, port, self.describe, self._metrics)
        self._admissions = Admissions()
        self._publisher = Publisher(self._config.max_pending_steps, self._on_router_gone)
        # The engine thread's.
        self._handovers = HandOvers(self.intake.table.counters)
        self._lease_added = asyncio.Event()
        self._lease_watch: asyncio.Task[None] | None = None
        self._load = loop.engine.snapshot()

    @property
    def address(self) -> str:
        return self._server.address

    # -- life --------------------------------------------------------------------------------------

    async def start(self) -> str:
        """Serves; returns the address. Raises RuntimeError where a port is taken."""
        self._asyncio = asyncio.get_running_loop()
        self._endpoint = self._make_endpoint(self.intake.receiver)
        worker_pb2_grpc.add_DecodeWorkerServicer_to_server(DecodeServicer(self), self._server.server)
        await asyncio.wrap_future(self._loop.set_listener(self._on_step))
        self._loop.on_failure = self._on_engine_failure
        try:
            await self._server.start()
        except RuntimeError:
            self._endpoint.stop()
            await asyncio.wrap_future(self._loop.set_listener(None))
            raise
        self._endpoint.start()
        self._lease_watch = asyncio.create_task(self._watch_leases(), name="leases")
        self._lease_watch.add_done_callback(self._on_lease_watch_over)
        role = self.identity.role.value
        log.info("serving worker=%s role=%s address=%s", self.identity.worker_id, role, self.address)
        return self.address

    async def drain(self) -> None:
        """Refuses new sequences; returns when all admitted ones have ended."""
        if self.state is WorkerState.READY:
            self.state = WorkerState.DRAINING
        await self._server.set_serving(False)
        await self._admissions.wait_until_empty()

    async def stop(self) -> None:
        """Ends everything with a typed status, in bounded time. Idempotent."""
        if self.state is WorkerState.STOPPED:
            return
        self.state = WorkerState.STOPPED
        self._end_all(Unavailable(f"{self.identity.worker_id} stops", reason="STOPPING"))
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
        counters = engine_counters(self._load)
        counters.kv_bytes_received = self.intake.table.bytes_received
        counters.num_expired_leases = self.intake.table.num_expired_leases
        counters.transfers.extend(transfer_counters(self.intake.table.counters))
        failure = self._loop.failure
        detail = "" if failure is None else f"the engine failed: {failure}"
        status = worker_status(
            self.identity, self.state, detail, self.address, self._loop.engine, self.load(), counters
        )
        status.quarantines.extend(quarantine_messages(self.intake.table.quarantines()))
        return status

    def load(self) -> cluster_pb2.WorkerLoad:
        return worker_load(self._load, num_reservations=self.intake.table.num_reservations)

    def check_integrity(self) -> None:
        self.intake.table.check_integrity()

    # -- what a router asks ------------------------------------------------------------------------

    async def grammar(self, spec: worker_pb2.SequenceSpec) -> Grammar | None:
        return await grammar_of(self._loop.engine.grammars, spec)

    async def reserve(
        self, key: TransferKey, router_id: str, request: SequenceRequest, mode: Mode, origin: Origin
    ) -> PushTarget | None:
        """Lets a sequence in: where to push its KV, or None for one that is computed here. The same key
        again gets the same answer. Raises PdserveError, or NoRoom or CannotFit."""
        admission = self._admissions.get(request.sequence_id)
        if admission is None:
            record = DecodeRecord(self._recorder.record(key, origin))
            admission = self._admit(key, router_id, request, mode, record)
            try:
                admission.grant(await run_on_engine(self._loop, lambda engine: self._take(engine, admission)))
            except asyncio.CancelledError:  # what it takes all the same is given back
                self._drop(admission)
                raise
            except (EngineError, PdserveError) as error:
                # The engine took nothing, and the router may ask again with the same key.
                refusal = typed(error) if isinstance(error, EngineError) else error
                self._admissions.remove(admission, refusal)
                admission.refuse(error)
                raise
            self._lease_added.set()
        elif admission.router_id != router_id:
            raise FailedPrecondition(f"{key} is another router's", reason="FOREIGN_ROUTER")
        return await asyncio.shield(admission.granted)

    def release(self, keys: Sequence[TransferKey]) -> int:
        """Idempotent; how many of the keys still held something."""
        num_released = 0
        for key in keys:
            admission = self._admissions.get(str(key))
            if admission is None:
                self.intake.table.release(key)  # a Reserve for it that is still on its way is refused
            else:
                num_released += self._drop(admission)
        return num_released

    def subscribe(self, router_id: str) -> Subscription:
        return self._publisher.subscribe(router_id)

    def unsubscribe(self, subscription: Subscription) -> None:
        self._publisher.unsubscribe(subscription)

    def _on_router_gone(self, router_id: str) -> None:
        for admission in self._admissions.of_router(router_id):
            self._drop(admission)

    def _admit(
        self, key: TransferKey, router_id: str, request: SequenceRequest, mode: Mode, record: DecodeRecord
    ) -> Admission:
        name, role = self.identity.worker_id, self.identity.role
        if self.state is not WorkerState.READY:
            raise Unavailable(f"{name} is {self.state.value}", reason=self.state.name, retry_after_s=0.0)
        if mode is Mode.PREFILL_HERE and role is not Role.COLOCATED:
            raise FailedPrecondition(f"{name} is a {role.value} worker: it runs no prompts", reason="ROLE")
        if router_id not in self._publisher:
            raise FailedPrecondition(f"router {router_id} has no subscription", reason="NO_SUBSCRIPTION")
        if mode is Mode.PREFILL_HERE and self._load.num_waiting >= self._config.max_num_waiting:
            raise ResourceExhausted(f"{name} is full", reason="BACKLOG", retry_after_s=RETRY_AFTER_S)
        self.intake.table.require_unused(key)
        for older in self._admissions.older_epochs(key):
            self._drop(older)
        admission = Admission(key, router_id, request, mode, self._asyncio.create_future(), record)
        self._admissions.add(admission)
        return admission

    def _drop(self, admission: Admission, outcome: PdserveError | Released = Released.BY_ROUTER) -> bool:
        """Ends it in whatever state, without a word to its router. False if it had ended before."""
        if not self._admissions.remove(admission, outcome):
            return False
        admission.refuse(Aborted(f"{admission.key} was released", reason="TRANSFER_ENDED"))
        self.intake.table.release(admission.key)
        post_to_engine(self._loop, lambda engine: self._cancel(engine, admission))
        return True

    # -- what happens to sequences: posted to the asyncio loop ----------------------------------------

    def _publish(self, result: StepResult, started: Mapping[str, HandOver]) -> None:
        batches = step_batches(result.outputs, self._admissions, started)
        has_ended = False
        for output in result.outputs:
            if output.is_last and (admission := self._admissions.get(output.sequence_id)) is not None:
                has_ended = True
                self._admissions.remove(admission, output.finish_reason or failure(output))
                self.intake.table.release(admission.key)  # its key is used up
        self._publisher.tell_step(batches, is_load_news=has_ended)

    def _on_joined(self, key: TransferKey, first: NewToken) -> None:
        admission = self._admissions.get(str(key))
        if admission is not None:
            admission.record.begun()
            self._publisher.tell(admission.router_id, StepBatch(tokens=[StepToken(key, first)]))

    def _on_broke(self, key: TransferKey, error: PdserveError) -> None:
        admission = self._admissions.get(str(key))
        if admission is not None:
            log.info("failed: %s", error.message, extra=admission.record.ids)
            self._admissions.remove(admission, error)
            self._publisher.tell_failure(admission.router_id, key, error)

    def _on_freed(self, key: TransferKey) -> None:
        """An admission is still there only where P took its transfer back; the router hears that from P."""
        admission = self._admissions.get(str(key))
        if admission is not None:
            self._admissions.remove(admission, Released.BY_SENDER)
        self._tell_load()

    def _tell_load(self) -> None:
        self._publisher.tell_step({}, is_load_news=True)

    def _end_all(self, error: PdserveError) -> None:
        for admission in self._admissions.all():
            self._publisher.tell_failure(admission.router_id, admission.key, error)
            self._drop(admission, error)
        self._publisher.finish(error)

    async def _watch_leases(self) -> None:
        """The one timer: sleeps until a lease could run out, or the first one begins."""
        while True:
            self._lease_added.clear()
            left_s = self.intake.table.expire()
            try:
                await asyncio.wait_for(self._lease_added.wait(), left_s)
            except asyncio.TimeoutError:
                continue

    def _on_lease_watch_over(self, watch: asyncio.Task[None]) -> None:
        if not watch.cancelled():  # it never ends by itself
            log.critical("the lease watch failed", exc_info=watch.exception())
            self._fail(Internal("the lease watch failed"))

    # -- from other threads ------------------------------------------------------------------------

    def joined(self, reservation: Reservation, first: NewToken, load: EngineLoad) -> None:
        self._load = load
        self._handovers.joined(str(reservation.key), reservation)
        self._asyncio.call_soon_threadsafe(self._on_joined, reservation.key, first)

    def broke(self, key: TransferKey, error: PdserveError) -> None:
        self._asyncio.call_soon_threadsafe(self._on_broke, key, error)

    def quarantined(self, load: EngineLoad) -> None:
        self._load = load
        self._asyncio.call_soon_threadsafe(self._tell_load)

    def freed(self, key: TransferKey, load: EngineLoad) -> None:
        self._load = load
        self._asyncio.call_soon_threadsafe(self._on_freed, key)

    def _take(self, engine: Engine, admission: Admission) -> PushTarget | None:
        """On the engine's thread."""
        if admission.mode is Mode.PREFILL_HERE:
            engine.add(admission.request)
            self._load = engine.snapshot()
            return None
        lease_s = self._config.lease_s
        blocks = self.intake.reserve(engine, admission.key, admission.request, lease_s)
        self._load = engine.snapshot()
        if self._endpoint is None:
            raise Internal(f"{self.identity.worker_id} was not started")
        return PushTarget(
            key=admission.key,
            instance_id=self.identity.instance_id,
            ways=self._endpoint.ways,
            num_cached_blocks=blocks.num_cached_blocks,
            num_blocks=len(blocks.block_ids),
            lease_s=lease_s,
        )

    def _cancel(self, engine: Engine, admission: Admission) -> None:
        if engine.cancel(admission.request.sequence_id):
            self._handovers.left(admission.request.sequence_id)
            self.freed(admission.key, engine.snapshot())

    def _on_step(self, result: StepResult) -> None:
        started = self._handovers.stepped(result, time.time_ns())
        self._metrics.note_step(result)
        self._load = self._loop.engine.snapshot()
        self._asyncio.call_soon_threadsafe(self._publish, result, started)

    def _on_engine_failure(self, error: BaseException) -> None:
        self._asyncio.call_soon_threadsafe(self._fail, Unavailable(f"the engine failed: {error}"))

    def _fail(self, error: PdserveError) -> None:
        if self.state is not WorkerState.STOPPED:
            self.state = WorkerState.FAILED
            self._end_all(error)

    def _grpc_endpoint(self, sink: FrameSink) -> PushEndpoint:
        return GrpcPushServer(sink, self._host, self._config.kv_port, self._loop.engine.layout.block_bytes)
