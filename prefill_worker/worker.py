"""The prefill role on an engine: prompts come in, KV goes out, the first token is the answer.

Three kinds of threads: the asyncio loop owns the table of prefills and serves control; the engine's
thread computes, and after each step offers what is final to the transfer; the sender's threads ship it.
No one of them waits for another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future
from functools import partial

from engine.engine import Engine
from engine.grammar import Grammar
from engine.layer_watch import PromptEnd
from engine.loop import EngineLoop
from engine.request import SequenceRequest, StepResult
from kv_transfer.blocks import pool_blocks
from kv_transfer.sender import Sender
from kv_transfer.transfer import PushTarget, TransferReport
from kv_transfer.transport.base import Transport
from kv_transfer.transport.grpc import GrpcTransport
from observability.tracing import NO_TRACER, Tracer
from pdserve.v1 import cluster_pb2, worker_pb2, worker_pb2_grpc
from pdserve.v1.errors import (
    Cancelled,
    FailedPrecondition,
    InvalidArgument,
    PdserveError,
    ResourceExhausted,
    Unavailable,
)
from prefill_worker.config import PrefillConfig
from prefill_worker.prefill import FirstToken, Prefill
from prefill_worker.service import PrefillServicer
from trust.errors import TrustError
from trust.trust import Trust
from worker.control_server import ControlServer
from worker.engine_calls import post_to_engine, run_on_engine
from worker.grammars import grammar_of
from worker.heartbeat import Heartbeat
from worker.identity import Role, WorkerIdentity, WorkerState
from worker.messages import worker_load
from worker.metrics import WorkerMetrics
from worker.record import Recorder
from worker.status import engine_counters, transfer_counters, worker_status
from worker.statuses import RETRY_AFTER_S

log = logging.getLogger(__name__)


class PrefillWorker:
    """A shell on an engine that outlives it: `stop` leaves the engine as `start` found it.

    `trust`: who may call it, and how decode workers know it. `transports` adds to the gRPC transport, or
    replaces it. `tracer` is closed by `stop`.
    """

    def __init__(
        self,
        worker_id: str,
        loop: EngineLoop,
        trust: Trust,
        host: str = "127.0.0.1",
        port: int = 0,
        config: PrefillConfig | None = None,
        transports: tuple[Transport, ...] = (),
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self.identity = WorkerIdentity(worker_id, Role.PREFILL)
        self.state = WorkerState.READY
        self._config = config or PrefillConfig()
        self._loop = loop
        layout = loop.engine.layout
        grpc_transport = GrpcTransport(trust, layout.block_bytes, self._config.connect_timeout_s)
        by_name: dict[str, Transport] = {t.name: t for t in (grpc_transport, *transports)}
        self.sender = Sender(layout, pool_blocks(loop.engine.pool), by_name, self._config.sender)
        self._metrics = WorkerMetrics(self.describe)
        self._recorder = Recorder(worker_id, tracer)
        heartbeat = Heartbeat(worker_id, loop.engine.progress)
        self._server = ControlServer(trust, host, port, self.describe, self._metrics, heartbeat)
        # All prefills until their blocks are free again. The asyncio loop's.
        self._prefills: dict[str, Prefill] = {}
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        # Those whose sequence the engine knows. The engine thread's.
        self._computing: dict[str, Prefill] = {}
        self._load = loop.engine.snapshot()

    @property
    def address(self) -> str:
        return self._server.address

    # -- life --------------------------------------------------------------------------------------

    async def start(self) -> str:
        """Serves; returns the address. Raises RuntimeError where the port is taken, and TrustError."""
        self._asyncio = asyncio.get_running_loop()
        worker_pb2_grpc.add_PrefillWorkerServicer_to_server(
            PrefillServicer(self, self._recorder), self._server.server
        )
        await asyncio.wrap_future(self._loop.set_listener(self._on_step))
        await asyncio.wrap_future(self._loop.call(self._watch_layers))
        self._loop.on_failure = self._on_engine_failure
        try:
            await self._server.start()
        except (RuntimeError, TrustError):
            await self._stop_listening()
            raise
        log.info("serving worker=%s role=prefill address=%s", self.identity.worker_id, self.address)
        return self.address

    async def drain(self) -> None:
        """Refuses new prompts; returns when all accepted ones are handed over and their blocks are free."""
        if self.state is WorkerState.READY:
            self.state = WorkerState.DRAINING
        await self._server.set_serving(False)
        await self._is_idle.wait()

    async def stop(self) -> None:
        """Ends everything with a typed status, in bounded time. Idempotent."""
        if self.state is WorkerState.STOPPED:
            return
        self.state = WorkerState.STOPPED
        error = Unavailable(f"{self.identity.worker_id} stops", reason="STOPPING")
        for prefill in list(self._prefills.values()):
            prefill.transfer.abort(error)
        # Fails what a blocked thread still holds, and returns when no thread reads a block any more.
        await asyncio.to_thread(self.sender.close)
        await self._is_idle.wait()
        await self._server.stop(self._config.stop_grace_s)
        self._loop.on_failure = None
        if self._loop.failure is None:
            await self._stop_listening()
        await self._recorder.close()

    async def _stop_listening(self) -> None:
        await asyncio.wrap_future(self._loop.set_listener(None))
        await asyncio.wrap_future(self._loop.call(lambda engine: engine.set_layer_listener(None)))

    def describe(self) -> cluster_pb2.WorkerStatus:
        counters = engine_counters(self._load)
        counters.kv_bytes_sent = self.sender.bytes_sent
        counters.transfers.extend(transfer_counters(self.sender.counters))
        failure = self._loop.failure
        detail = "" if failure is None else f"the engine failed: {failure}"
        status = worker_status(
            self.identity, self.state, detail, self.address, self._loop.engine, self.load(), counters
        )
        for instance_id, transport in self.sender.routes().items():
            if transport == "collective" and self._loop.engine.pool.tensor.device.type == "cuda":
                transport += " (NCCL, unverified: see benchmarks/nccl_pair.py)"
            status.kv_routes.add(instance_id=instance_id, transport=transport)
        return status

    def load(self) -> cluster_pb2.WorkerLoad:
        return worker_load(self._load, num_transfers=len(self._prefills))

    def check_integrity(self) -> None:
        self.sender.check_integrity()

    # -- one prompt --------------------------------------------------------------------------------

    async def grammar(self, spec: worker_pb2.SequenceSpec) -> Grammar | None:
        return await grammar_of(self._loop.engine.grammars, spec)

    async def prefill(
        self, request: SequenceRequest, target: PushTarget
    ) -> AsyncGenerator[FirstToken | TransferReport, None]:
        """The first token as soon as it is drawn, then the report of the hand-over. Raises PdserveError, or
        CannotFit. Leaving early (cancel) drops the sequence and aborts its transfer."""
        prefill = self._accept(request, target)
        try:
            await run_on_engine(self._loop, lambda engine: self._begin(engine, prefill))
            first = await prefill.first
            yield first
            if first.finish_reason is None:
                yield await prefill.report
        finally:
            self._leave(prefill)

    def _accept(self, request: SequenceRequest, target: PushTarget) -> Prefill:
        name = self.identity.worker_id
        if self.state is not WorkerState.READY:
            raise Unavailable(f"{name} is {self.state.value}", reason=self.state.name, retry_after_s=0.0)
        if request.sequence_id in self._prefills:
            raise FailedPrecondition(f"{request.sequence_id} is being prefilled", reason="TRANSFER_OPEN")
        num_tokens = len(request.prompt_token_ids) + len(request.known_token_ids)
        if self._loop.engine.layout.num_blocks_for(num_tokens) != target.num_blocks:
            raise InvalidArgument(f"{target.num_blocks} blocks are reserved for {num_tokens} tokens")
        if len(self._prefills) >= self._config.max_num_prefills:
            raise ResourceExhausted(
                f"{name} has {len(self._prefills)} prompts", reason="BACKLOG", retry_after_s=RETRY_AFTER_S
            )
        prefill = Prefill(request, self.sender.open(target), self._asyncio)
        self._prefills[prefill.sequence_id] = prefill
        self._is_idle.clear()
        # By its name: a future keeps its callbacks, and a prompt in a circle would stay in memory for long.
        prefill.transfer.done.add_done_callback(partial(self._on_transfer_over, prefill.sequence_id))
        return prefill

    def _leave(self, prefill: Prefill) -> None:
        """After an ordinary end the transfer is over, and this does nothing."""
        prefill.transfer.abort(Cancelled(f"{prefill.sequence_id}: the call ended"))
        if not prefill.transfer.done.done():  # a thread still reads the blocks: they stay held
            post_to_engine(self._loop, lambda engine: engine.cancel(prefill.sequence_id))

    def _on_transfer_over(self, sequence_id: str, outcome: Future[TransferReport | None]) -> None:
        """From whichever thread ended it: nobody reads the blocks any more."""
        post_to_engine(self._loop, lambda engine: self._end(engine, sequence_id))
        self._asyncio.call_soon_threadsafe(self._forget, sequence_id, outcome)

    def _forget(self, sequence_id: str, outcome: Future[TransferReport | None]) -> None:
        self._prefills.pop(sequence_id).set_outcome(outcome)
        if not self._prefills:
            self._is_idle.set()

    # -- on the engine's thread --------------------------------------------------------------------

    def _begin(self, engine: Engine, prefill: Prefill) -> None:
        if not prefill.transfer.is_ended:
            engine.add(prefill.request, prefill.accepted_at_s)
            self._computing[prefill.sequence_id] = prefill
            self._load = engine.snapshot()

    def _end(self, engine: Engine, sequence_id: str) -> None:
        if self._computing.pop(sequence_id, None) is not None:
            engine.cancel(sequence_id)
            engine.release_hold(sequence_id)
            self._load = engine.snapshot()

    def _watch_layers(self, engine: Engine) -> None:
        engine.set_layer_listener(self._on_layers, self._config.min_group_bytes)

    def _on_layers(self, ends: Sequence[PromptEnd], num_layers: int) -> None:
        """In the middle of a step."""
        engine = self._loop.engine
        for end in ends:
            prefill = self._computing.get(end.sequence_id)
            if prefill is not None:
                table = engine.block_table(end.sequence_id)
                prefill.transfer.offer(table, end.start // engine.layout.block_size)
                prefill.transfer.offer_layers(table, end.end, num_layers)

    def _on_step(self, result: StepResult) -> None:
        engine = self._loop.engine
        self._metrics.note_step(result)
        self._load = engine.snapshot()  # the first token brings it to the router
        for output in result.outputs:
            prefill = self._computing.get(output.sequence_id)
            if prefill is None:
                continue
            table = engine.block_table(output.sequence_id)
            prefill.advance(output, table, engine.layout.block_size)

    def _on_engine_failure(self, error: BaseException) -> None:
        self._asyncio.call_soon_threadsafe(self._fail_all, Unavailable(f"the engine failed: {error}"))

    def _fail_all(self, error: PdserveError) -> None:
        if self.state is not WorkerState.STOPPED:
            self.state = WorkerState.FAILED
        for prefill in list(self._prefills.values()):
            prefill.transfer.abort(error)
