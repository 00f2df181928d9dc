"""A router of a few lines, and workers in the test's own process: real gRPC between them all."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial

import grpc

from cluster.actors.kv_ways import make_endpoint, make_transports
from cluster.config import TransportName
from decode_worker.config import DecodeConfig
from decode_worker.worker import DecodeWorker
from engine.kv_pool import allocate_memory
from engine.loop import EngineLoop
from engine.sampling import SamplingParams
from kv_transfer.shared_pool import PoolMemory
from kv_transfer.transport.memory import MemoryEndpoint, MemoryTransport
from pdserve.v1 import worker_pb2, worker_pb2_grpc
from pdserve.v1.errors import Cancelled, PdserveError, Unavailable, from_code, from_rpc_error
from prefill_worker.config import PrefillConfig
from prefill_worker.worker import PrefillWorker
from tests.integrity import wait_until
from tests.trusted import TRUST
from trust.channels import open_aio_channel
from worker.identity import Role

RECEIVE = worker_pb2.ReserveRequest.MODE_RECEIVE_KV
HERE = worker_pb2.ReserveRequest.MODE_PREFILL_HERE
WAIT_S = 30.0
Spec = worker_pb2.SequenceSpec


def spec(
    prompt: Sequence[int],
    max_tokens: int = 8,
    *,
    known: Sequence[int] = (),
    sampling: SamplingParams | None = None,
    transfer_id: str | None = None,
    epoch: int = 0,
    ignore_eos: bool = True,
    stop_token_ids: Sequence[int] = (),
    logprobs: int | None = None,
) -> Spec:
    sampling = sampling or SamplingParams()
    made = Spec(
        transfer_id=transfer_id or uuid.uuid4().hex,
        epoch=epoch,
        prompt_token_ids=prompt,
        known_token_ids=known,
    )
    made.sampling.temperature = sampling.temperature
    made.sampling.seed = sampling.seed
    made.stop.max_tokens = max_tokens
    made.stop.ignore_eos = ignore_eos
    made.stop.stop_token_ids.extend(stop_token_ids)
    if logprobs is not None:
        made.output.logprobs = logprobs
    return made


@dataclass
class Answer:
    """What came of one attempt, by the router's rules: ordered and de-duplicated by position."""

    tokens: dict[int, int] = field(default_factory=dict)
    finish_reason: int = 0
    end: worker_pb2.TransferEnd | None = None
    first: worker_pb2.TokenOutput | None = None

    @property
    def ids(self) -> list[int]:
        positions = sorted(self.tokens)
        assert positions == list(range(positions[0], positions[0] + len(positions)))
        return [self.tokens[position] for position in positions]

    def take(self, output: worker_pb2.TokenOutput) -> None:
        assert self.tokens.setdefault(output.position, output.token_id) == output.token_id
        self.finish_reason = output.finish_reason or self.finish_reason


class Decoder:
    """The router's end of one decode worker: its stub, and its Subscribe."""

    def __init__(self, address: str, router_id: str) -> None:
        self.channel = open_aio_channel(address, TRUST)
        self.stub = worker_pb2_grpc.DecodeWorkerStub(self.channel)
        self.router_id = router_id
        self.error: PdserveError | None = None
        self.load = None
        self._queues: dict[tuple[str, int], asyncio.Queue[worker_pb2.TokenOutput | PdserveError]] = {}
        self._seen: dict[tuple[str, int], asyncio.Event] = {}
        self.call = self.stub.Subscribe(worker_pb2.SubscribeRequest(router_id=router_id))
        self._is_open = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    async def opened(self) -> Decoder:
        await asyncio.wait_for(self._is_open.wait(), WAIT_S)
        return self

    def queue(self, key: tuple[str, int]) -> asyncio.Queue[worker_pb2.TokenOutput | PdserveError]:
        return self._queues.setdefault(key, asyncio.Queue())

    async def seen(self, key: tuple[str, int]) -> None:
        """A token of this sequence has come."""
        await asyncio.wait_for(self._seen.setdefault(key, asyncio.Event()).wait(), WAIT_S)

    async def reserve(self, sequence: Spec, mode: int = RECEIVE) -> worker_pb2.ReserveResponse:
        request = worker_pb2.ReserveRequest(sequence=sequence, router_id=self.router_id, mode=mode)
        return await typed(self.stub.Reserve(request))

    async def release(self, *sequences: Spec) -> int:
        keys = [worker_pb2.SequenceKey(transfer_id=s.transfer_id, epoch=s.epoch) for s in sequences]
        return (await typed(self.stub.Release(worker_pb2.ReleaseRequest(keys=keys)))).num_released

    async def close(self) -> None:
        self.call.cancel()
        await asyncio.wait([self._reader])
        await self.channel.close()

    async def _read(self) -> None:
        try:
            async for message in self.call:
                self.load = message.load
                self._is_open.set()
                for token in message.tokens:
                    self._seen.setdefault((token.transfer_id, token.epoch), asyncio.Event()).set()
                    self.queue((token.transfer_id, token.epoch)).put_nowait(token)
                for failed in message.failed:
                    error = from_code(failed.code, failed.message)
                    self.queue((failed.transfer_id, failed.epoch)).put_nowait(error)
        except grpc.RpcError as error:
            self.error = from_rpc_error(error)
        except asyncio.CancelledError:
            pass
        for queue in self._queues.values():
            queue.put_nowait(self.error or PdserveError("the stream ended"))


async def typed(call):  # type: ignore[no-untyped-def]
    """The answer of a unary call, or its typed error."""
    try:
        return await call
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None


class Cluster:
    def __init__(self, make_loop: Callable[..., EngineLoop]) -> None:
        self._make_loop = make_loop
        self._stack = AsyncExitStack()
        self._numbers = itertools.count()
        self.memory = MemoryTransport()

    async def prefill_worker(
        self, config: PrefillConfig | None = None, loop: EngineLoop | None = None, **engine: object
    ) -> PrefillWorker:
        name = f"prefill-{next(self._numbers)}"
        loop = loop or self._make_loop(**engine)
        # Tiny models have little KV: without this none would be shipped by layers.
        config = config or PrefillConfig(min_group_bytes=1)
        transports = (self.memory, *make_transports(TRUST, loop.engine.pool, config.connect_timeout_s))
        worker = PrefillWorker(name, loop, TRUST, config=config, transports=transports)
        await worker.start()
        self._stack.push_async_callback(worker.stop)
        return worker

    async def decode_worker(
        self,
        config: DecodeConfig | None = None,
        role: Role = Role.DECODE,
        transport: str = "grpc",
        loop: EngineLoop | None = None,
        **engine: object,
    ) -> DecodeWorker:
        name = f"{role.value}-{next(self._numbers)}"
        shared = PoolMemory()
        allocate = shared if transport in ("auto", "shm") else allocate_memory
        loop = loop or self._make_loop(allocate, **engine)
        endpoint = None  # grpc, at the port that the config names
        if transport == "memory":
            endpoint = partial(MemoryEndpoint, self.memory, name)
        elif transport != "grpc":
            endpoint = partial(
                make_endpoint, TRUST, TransportName(transport), loop.engine.pool, shared, "127.0.0.1"
            )
        worker = DecodeWorker(name, loop, TRUST, role=role, config=config, endpoint=endpoint)
        await worker.start()
        self._stack.push_async_callback(worker.stop)
        return worker

    async def subscribe(self, worker: DecodeWorker, router_id: str = "router") -> Decoder:
        decoder = await Decoder(worker.address, router_id).opened()
        self._stack.push_async_callback(decoder.close)
        return decoder

    def prefill_stub(self, worker: PrefillWorker) -> worker_pb2_grpc.PrefillWorkerStub:
        channel = open_aio_channel(worker.address, TRUST)
        self._stack.push_async_callback(channel.close)
        return worker_pb2_grpc.PrefillWorkerStub(channel)

    async def stop(self) -> None:
        await self._stack.aclose()


class Route:
    """One prefill worker, one decode worker, and a router's way through both."""

    def __init__(self, prefill: worker_pb2_grpc.PrefillWorkerStub, decoder: Decoder) -> None:
        self.prefill = prefill
        self.decoder = decoder

    async def generate(self, sequence: Spec) -> Answer:
        """Reserve, prefill, then stream; releases whatever happens. Raises the attempt's typed error."""
        answer = Answer()
        try:
            reserved = await self.decoder.reserve(sequence)
            await self.push(sequence, reserved.reservation, answer)
            if answer.finish_reason == 0:
                await self.stream(sequence, answer)
            return answer
        finally:
            with suppress(Unavailable, Cancelled):  # a worker that stops holds nothing any more
                await self.decoder.release(sequence)

    async def push(self, sequence: Spec, reservation: worker_pb2.Reservation, answer: Answer) -> None:
        request = worker_pb2.PrefillRequest(sequence=sequence, reservation=reservation)
        try:
            async for event in self.prefill.Prefill(request):
                if event.HasField("first_token"):
                    answer.first = event.first_token.token
                    answer.take(event.first_token.token)
                else:
                    answer.end = event.transfer_end
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    async def stream(self, sequence: Spec, answer: Answer) -> None:
        queue = self.decoder.queue((sequence.transfer_id, sequence.epoch))
        while answer.finish_reason == 0:
            output = await asyncio.wait_for(queue.get(), WAIT_S)
            if isinstance(output, PdserveError):
                raise output
            answer.take(output)


async def route(cluster: Cluster, transport: str = "grpc", **engine: object) -> Route:
    """1P1D."""
    decode = await cluster.decode_worker(transport=transport, **engine)
    prefill = await cluster.prefill_worker(**engine)
    return Route(cluster.prefill_stub(prefill), await cluster.subscribe(decode))


async def eventually(is_true: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """For what other threads bring about."""
    assert await asyncio.to_thread(wait_until, is_true, timeout_s)
