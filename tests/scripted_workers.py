"""Workers that compute nothing: real gRPC servers that speak worker.proto and yield tokens by a rule.

The rule depends on prompt, seed and position only, so that a resumed sequence goes on as an undisturbed
one would. Knobs make them slow, full, broken or dead.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import grpc
from grpc_health.v1 import health, health_pb2_grpc

from pdserve.v1 import cluster_pb2, generation_pb2, worker_pb2, worker_pb2_grpc
from pdserve.v1.errors import FailedPrecondition, PdserveError, ResourceExhausted, to_status

BLOCK_SIZE = 4
MAX_SEQUENCE_TOKENS = 400
OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", -1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
)

Key = tuple[str, int]
Rule = Callable[[Sequence[int], int, int], int]


def letters(prompt: Sequence[int], seed: int, position: int) -> int:
    """Ids 64..89 of the tests' byte-level vocabulary: lower-case letters."""
    digest = hashlib.blake2b(repr((tuple(prompt), seed, position)).encode(), digest_size=4).digest()
    return 64 + int.from_bytes(digest, "little") % 26


def expected(prompt: Sequence[int], seed: int, num_tokens: int, rule: Rule = letters) -> tuple[int, ...]:
    return tuple(rule(prompt, seed, position) for position in range(num_tokens))


async def abort(context: grpc.aio.ServicerContext[object, object], error: PdserveError) -> None:
    status = to_status(error)
    await context.abort(status.code, status.details, status.trailing_metadata)


class Signs(worker_pb2_grpc.WorkerServicer):
    """Signs of life, which a test may change or stop."""

    def __init__(self) -> None:
        self.vitals = cluster_pb2.Vitals(progress=1)
        # Said while set.
        self.speaks = asyncio.Event()
        self.speaks.set()

    def stall(self) -> None:
        """Its engine is in a step, and gets no further."""
        self.vitals = cluster_pb2.Vitals(progress=7, is_working=True)

    def live(self) -> None:
        self.vitals = cluster_pb2.Vitals(progress=8)

    async def Watch(
        self, request: worker_pb2.WatchVitalsRequest, context: object
    ) -> AsyncIterator[cluster_pb2.Vitals]:
        while True:
            await self.speaks.wait()
            yield self.vitals
            await asyncio.sleep(0.02)


@dataclass(eq=False)
class ScriptedWorker:
    """What both kinds share: a server, an identity, a place in the snapshot."""

    id: str
    role: cluster_pb2.Role = cluster_pb2.ROLE_PREFILL
    rule: Rule = letters
    state: cluster_pb2.WorkerState = cluster_pb2.WORKER_STATE_READY
    instance_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    address: str = "127.0.0.1:0"
    signs: Signs = field(default_factory=Signs)
    server: grpc.aio.Server | None = None

    def services(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError

    async def start(self) -> None:
        self.server = grpc.aio.server(options=OPTIONS)
        worker_pb2_grpc.add_WorkerServicer_to_server(self.signs, self.server)
        self.services(self.server)
        health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), self.server)
        host = self.address.rpartition(":")[0]
        self.address = f"{host}:{self.server.add_insecure_port(self.address)}"
        await self.server.start()

    async def stop(self) -> None:
        """At once, as if killed."""
        if self.server is not None:
            server, self.server = self.server, None
            await server.stop(0)

    def status(self) -> cluster_pb2.WorkerStatus:
        return cluster_pb2.WorkerStatus(
            id=self.id,
            instance_id=self.instance_id,
            role=self.role,
            state=self.state,
            address=self.address,
            limits=cluster_pb2.WorkerLimits(
                max_model_len=1024,
                block_size=BLOCK_SIZE,
                max_num_seqs=64,
                kv_blocks_total=100,
                max_sequence_tokens=MAX_SEQUENCE_TOKENS,
                layout=cluster_pb2.KVLayout(dtype="float32"),
            ),
        )


class ScriptedDecode(ScriptedWorker, worker_pb2_grpc.DecodeWorkerServicer):
    """A decode worker, or a colocated one."""

    def __init__(self, id: str, role: cluster_pb2.Role = cluster_pb2.ROLE_DECODE, **knobs: object) -> None:
        super().__init__(id, role)
        self.step_s = 0.001
        self.num_blocks = 100
        self.reserve_error: PdserveError | None = None
        self.num_release_failures = 0
        self.hold_reserve = asyncio.Event()
        self.hold_reserve.set()
        # A decode worker goes on only while this is set.
        self.go = asyncio.Event()
        self.go.set()
        # Ends its stream of tokens (as a crash would) once so many were sent.
        self.die_after_tokens: int | None = None
        self.reserved: dict[Key, worker_pb2.SequenceSpec] = {}
        self.specs: list[worker_pb2.SequenceSpec] = []
        self.num_tokens = 0
        self.num_reserves = 0
        self.releases: list[Key] = []
        self._subscribers: dict[str, asyncio.Queue[worker_pb2.StepOutput]] = {}
        self._sequences: dict[Key, asyncio.Task[None]] = {}
        self._routers: dict[Key, str] = {}
        for name, value in knobs.items():
            setattr(self, name, value)

    def services(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_DecodeWorkerServicer_to_server(self, server)

    @property
    def blocks_used(self) -> int:
        return sum(self._blocks(spec) for spec in self.reserved.values())

    @staticmethod
    def _blocks(spec: worker_pb2.SequenceSpec) -> int:
        return -(-(len(spec.prompt_token_ids) + len(spec.known_token_ids)) // BLOCK_SIZE)

    def load(self) -> cluster_pb2.WorkerLoad:
        return cluster_pb2.WorkerLoad(
            num_running=len(self._sequences),
            num_reservations=max(0, len(self.reserved) - len(self._sequences)),
            kv_blocks_free=self.num_blocks - self.blocks_used,
            kv_blocks_used=self.blocks_used,
        )

    async def Subscribe(
        self, request: worker_pb2.SubscribeRequest, context: object
    ) -> AsyncIterator[worker_pb2.StepOutput]:
        queue: asyncio.Queue[worker_pb2.StepOutput] = asyncio.Queue()
        self._subscribers[request.router_id] = queue
        queue.put_nowait(worker_pb2.StepOutput(load=self.load()))
        try:
            while True:
                yield await queue.get()
                if self.die_after_tokens is not None and self.num_tokens >= self.die_after_tokens:
                    self.die_after_tokens = None
                    return
        finally:
            if self._subscribers.get(request.router_id) is queue:
                del self._subscribers[request.router_id]
                for key in list(self.reserved):
                    self._let_go(key)

    async def Reserve(
        self,
        request: worker_pb2.ReserveRequest,
        context: grpc.aio.ServicerContext[worker_pb2.ReserveRequest, worker_pb2.ReserveResponse],
    ) -> worker_pb2.ReserveResponse:
        self.num_reserves += 1
        # An engine that has been asked goes on, whether or not the caller still waits.
        admitting = asyncio.ensure_future(self._admit(request))
        admitting.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            return await asyncio.shield(admitting)
        except PdserveError as error:
            await abort(context, error)
            raise

    async def _admit(self, request: worker_pb2.ReserveRequest) -> worker_pb2.ReserveResponse:
        await self.hold_reserve.wait()
        if self.reserve_error is not None:
            raise self.reserve_error
        if request.router_id not in self._subscribers:
            raise FailedPrecondition("no subscription")
        spec = request.sequence
        self.specs.append(spec)
        key = (spec.transfer_id, spec.epoch)
        if self.blocks_used + self._blocks(spec) > self.num_blocks:
            raise ResourceExhausted("no blocks")
        self.reserved[key] = spec
        if request.mode == worker_pb2.ReserveRequest.MODE_PREFILL_HERE:
            self._begin(key, request.router_id, len(spec.known_token_ids), is_prefilled_here=True)
            return worker_pb2.ReserveResponse(load=self.load())
        self._routers[key] = request.router_id
        reservation = worker_pb2.Reservation(
            transfer_id=spec.transfer_id,
            epoch=spec.epoch,
            instance_id=self.instance_id,
            ways=[worker_pb2.Way(transport="grpc", address=self.address)],
            num_blocks=self._blocks(spec),
            lease_ms=5000,
        )
        return worker_pb2.ReserveResponse(reservation=reservation, load=self.load())

    async def Release(
        self,
        request: worker_pb2.ReleaseRequest,
        context: grpc.aio.ServicerContext[worker_pb2.ReleaseRequest, worker_pb2.ReleaseResponse],
    ) -> worker_pb2.ReleaseResponse:
        if self.num_release_failures:
            self.num_release_failures -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "release failed")
        keys = [(key.transfer_id, key.epoch) for key in request.keys]
        self.releases.extend(keys)
        return worker_pb2.ReleaseResponse(num_released=sum(self._let_go(key) for key in keys))

    def commit(self, key: Key) -> bool:
        """A prefill worker's KV is all there."""
        if key not in self.reserved:
            return False
        self._begin(key, self._routers[key], len(self.reserved[key].known_token_ids), is_prefilled_here=False)
        return True

    def _begin(self, key: Key, router_id: str, position: int, *, is_prefilled_here: bool) -> None:
        work = self._decode(key, router_id, position, is_prefilled_here)
        self._sequences[key] = asyncio.ensure_future(work)

    async def _decode(self, key: Key, router_id: str, position: int, is_prefilled_here: bool) -> None:
        spec = self.reserved[key]
        last = spec.stop.max_tokens - 1
        while True:
            await self.go.wait()
            token = worker_pb2.TokenOutput(
                transfer_id=key[0],
                epoch=key[1],
                position=position,
                token_id=self.rule(spec.prompt_token_ids, spec.sampling.seed, position),
            )
            if is_prefilled_here:
                token.prefill.CopyFrom(worker_pb2.PrefillReport(prefill_ms=1.0))
                is_prefilled_here = False
            if position == last:
                token.finish_reason = generation_pb2.FINISH_REASON_LENGTH
                self._sequences.pop(key, None)
                self.reserved.pop(key, None)
            self.num_tokens += 1
            step = worker_pb2.StepOutput(tokens=[token], load=self.load())
            if (queue := self._subscribers.get(router_id)) is not None:
                queue.put_nowait(step)
            if position == last:
                return
            position += 1
            await asyncio.sleep(self.step_s)

    def _let_go(self, key: Key) -> bool:
        task = self._sequences.pop(key, None)
        if task is not None:
            task.cancel()
        return self.reserved.pop(key, None) is not None

    def send(self, router_id: str, step: worker_pb2.StepOutput) -> None:
        """By hand: forged, stale or failed ones."""
        self._subscribers[router_id].put_nowait(step)


class ScriptedPrefill(ScriptedWorker, worker_pb2_grpc.PrefillWorkerServicer):
    """`decodes` maps the instance ids of decode workers to where its "transfers" go."""

    def __init__(self, id: str, decodes: dict[str, ScriptedDecode], **knobs: object) -> None:
        super().__init__(id, cluster_pb2.ROLE_PREFILL)
        self._decodes = decodes
        self.fail_first: PdserveError | None = None  # raised once, before the first token
        self.fail_always: PdserveError | None = None
        self.fail_transfer: PdserveError | None = None  # raised once, behind the first token
        self.crash = False  # an exception that no handler foresaw
        self.hold_token = asyncio.Event()
        self.hold_token.set()
        self.hold_answer = asyncio.Event()  # commits before it answers
        self.hold_answer.set()
        self.hold_transfer = asyncio.Event()
        self.hold_transfer.set()
        self.finish_at_first: generation_pb2.FinishReason | None = None
        self.prefill_ms = 5.0  # what it says that each took
        self.num_prefills = 0
        self.num_cancelled = 0
        self.prompts: list[tuple[int, ...]] = []
        for name, value in knobs.items():
            setattr(self, name, value)

    def services(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_PrefillWorkerServicer_to_server(self, server)

    async def Prefill(
        self,
        request: worker_pb2.PrefillRequest,
        context: grpc.aio.ServicerContext[worker_pb2.PrefillRequest, worker_pb2.PrefillResponse],
    ) -> None:
        try:
            await self._prefill(request, context)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise

    async def _prefill(
        self,
        request: worker_pb2.PrefillRequest,
        context: grpc.aio.ServicerContext[worker_pb2.PrefillRequest, worker_pb2.PrefillResponse],
    ) -> None:
        self.num_prefills += 1
        spec = request.sequence
        self.prompts.append(tuple(spec.prompt_token_ids))
        await self.hold_token.wait()
        if self.crash:
            raise RuntimeError("a bug in the worker")
        if self.fail_always is not None:
            await abort(context, self.fail_always)
        if (error := self.fail_first) is not None:
            self.fail_first = None
            await abort(context, error)
        if not self.hold_answer.is_set():
            self._commit(spec, request.reservation)
            await self.hold_answer.wait()
        is_end = self._is_end(spec)
        await context.write(self._first_token(spec, is_end))
        if is_end:
            return
        await self.hold_transfer.wait()
        if (error := self.fail_transfer) is not None:
            self.fail_transfer = None
            await abort(context, error)
        self._commit(spec, request.reservation)
        end = worker_pb2.TransferEnd(transfer_ms=2.0, transfer_bytes=1000, num_blocks=3)
        await context.write(worker_pb2.PrefillResponse(transfer_end=end))

    def _is_end(self, spec: worker_pb2.SequenceSpec) -> bool:
        return self.finish_at_first is not None or spec.stop.max_tokens == len(spec.known_token_ids) + 1

    def _commit(self, spec: worker_pb2.SequenceSpec, reservation: worker_pb2.Reservation) -> None:
        self._decodes[reservation.instance_id].commit((spec.transfer_id, spec.epoch))

    def _first_token(self, spec: worker_pb2.SequenceSpec, is_end: bool) -> worker_pb2.PrefillResponse:
        position = len(spec.known_token_ids)
        token = worker_pb2.TokenOutput(
            transfer_id=spec.transfer_id,
            epoch=spec.epoch,
            position=position,
            token_id=self.rule(spec.prompt_token_ids, spec.sampling.seed, position),
            prefill=worker_pb2.PrefillReport(cached_tokens=4, queue_ms=1.0, prefill_ms=self.prefill_ms),
        )
        if is_end:
            token.finish_reason = self.finish_at_first or generation_pb2.FINISH_REASON_LENGTH
        return worker_pb2.PrefillResponse(first_token=worker_pb2.FirstToken(token=token))
