"""A real router on real workers in one process: real gRPC between them all, no Ray."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from cluster.actors.kv_ways import make_endpoint, make_transports
from cluster.config import TransportName as Configured
from decode_worker.config import DecodeConfig
from decode_worker.worker import DecodeWorker
from engine.config import EngineConfig
from engine.engine import Engine
from engine.kv_pool import allocate_memory
from engine.loading import LoadedModel
from engine.loop import EngineLoop
from kv_transfer.shared_pool import PoolMemory
from kv_transfer.transport.memory import MemoryEndpoint, MemoryTransport
from observability.config import ObservabilityConfig
from observability.tracing import Service, make_tracer
from pdserve.client import Client
from pdserve.v1 import cluster_pb2
from prefill_worker.config import PrefillConfig
from prefill_worker.worker import PrefillWorker
from router.config import RouterConfig
from router.front.server import RouterServer
from router.integrity import IntegrityError
from router.router import Router
from tests.integration.router.harness import until
from tests.static_control import StaticControl
from tests.trusted import TRUST_FILES
from trust.trust import TrustFiles
from worker.identity import Role

Worker = PrefillWorker | DecodeWorker
# "memory" is the tests' own; the others are what a configuration may ask for.
TransportName = Literal["memory", "auto", "shm", "collective", "grpc"]


@dataclass
class Serving:
    control: StaticControl
    server: RouterServer
    client: Client
    workers: list[Worker]
    # Shared by all workers where the transport is "memory"; its `faults` may be changed at any time.
    memory: MemoryTransport = field(default_factory=MemoryTransport)

    @property
    def router(self) -> Router:
        return self.server.router

    def of(self, role: Role) -> list[Worker]:
        return [worker for worker in self.workers if worker.identity.role is role]

    async def show(self) -> None:
        """Tell the router which workers there are now."""
        pools: dict[int, cluster_pb2.PoolStatus] = {}
        for worker in self.workers:
            status = worker.describe()
            pool = pools.setdefault(status.role, cluster_pb2.PoolStatus(role=status.role))
            pool.workers.append(status)
        await self.control.show(list(pools.values()))

    async def ready(self) -> None:
        """Until the router may choose every worker."""
        await self.show()
        names = {worker.identity.instance_id for worker in self.workers}
        await until(lambda: names <= {w.info.instance_id for w in self.router.table.all() if w.is_usable})

    def is_idle(self) -> bool:
        """Nothing is held for a request, on the router or on any worker."""
        try:
            self.router.check_idle()
        except IntegrityError:
            return False
        loads = [worker.describe().load for worker in self.workers]
        return all(not (load.kv_blocks_used or load.num_reservations or load.num_transfers) for load in loads)


@asynccontextmanager
async def serving(
    folder: Path,
    loaded: LoadedModel,
    roles: Iterable[Role] = (Role.PREFILL, Role.DECODE),
    *,
    transport: TransportName = "grpc",
    decode_config: DecodeConfig | None = None,
    prefill_config: PrefillConfig | None = None,
    router: dict[str, object] | None = None,
    models: Mapping[Role, LoadedModel] | None = None,
    blocks: Mapping[Role, int] | None = None,
    observability: ObservabilityConfig = ObservabilityConfig(),  # noqa: B008 - it is frozen
    trust: TrustFiles = TRUST_FILES,
    **engine: object,
) -> AsyncIterator[Serving]:
    """One worker for each role named, then a router; at the end everything must be given back.

    `router` and `engine` are settings (RouterConfig, EngineConfig) other than the tests' small ones;
    `models` and `blocks` (the size of a pool) are those of roles that differ.
    """
    memory = MemoryTransport()
    shown = trust.read()
    small: dict[str, object] = {"num_blocks": 64, "max_num_batched_tokens": 48, "poison_blocks": True}
    async with AsyncExitStack() as stack:
        workers: list[Worker] = []
        for index, role in enumerate(roles):
            model = (models or {}).get(role, loaded)
            own: dict[str, object] = {"num_blocks": blocks[role]} if blocks and role in blocks else {}
            shared = PoolMemory()
            allocate = shared if transport in ("auto", "shm") else allocate_memory
            loop = EngineLoop(Engine(model, EngineConfig.model_validate(small | engine | own), allocate))
            loop.start()
            stack.callback(loop.stop)
            name = f"{role.value}-{index}"
            tracer = make_tracer(observability.traces, Service(role.value, "test", name))
            if role is Role.PREFILL:
                transports = (memory, *make_transports(shown, loop.engine.pool, 5.0))
                # Tiny models have little KV: without this none would be shipped by layers.
                settings = prefill_config or PrefillConfig(min_group_bytes=1)
                worker: Worker = PrefillWorker(
                    name, loop, shown, config=settings, transports=transports, tracer=tracer
                )
            else:
                endpoint = (
                    partial(MemoryEndpoint, memory, name)
                    if transport == "memory"
                    else partial(
                        make_endpoint, shown, Configured(transport), loop.engine.pool, shared, "127.0.0.1"
                    )
                )
                worker = DecodeWorker(
                    name, loop, shown, role=role, config=decode_config, endpoint=endpoint, tracer=tracer
                )
            await worker.start()
            stack.push_async_callback(worker.stop)
            workers.append(worker)
        control = await stack.enter_async_context(StaticControl(trust=shown))
        fields: dict[str, object] = {
            "grpc": "127.0.0.1:0",
            "cluster": "test",
            "router_id": "router-0",
            "model": "tiny",
            "model_dir": folder,
            "control": control.address,
            "trust": trust,
            "observability": observability,
        }
        config = RouterConfig.model_validate(fields | (router or {}))
        server = await stack.enter_async_context(RouterServer(Router(config)))
        client = await stack.enter_async_context(Client(server.address))
        made = Serving(control, server, client, workers, memory)
        await made.ready()
        yield made
        await until(made.is_idle)
        for worker in made.workers:
            worker.check_integrity()
        _check_shares(made)


def _check_shares(made: Serving) -> None:
    """Each role did its own part of the work and no other's, and nothing was decoded without KV shipped."""
    counters = {role: [worker.describe().counters for worker in made.of(role)] for role in Role}
    prefill, decode = counters[Role.PREFILL], counters[Role.DECODE]
    assert sum(each.tokens_decoded for each in prefill) == 0
    assert sum(each.tokens_prefilled for each in decode) == 0
    for each in decode:
        assert each.kv_bytes_received > 0 or each.tokens_decoded == 0
    if any(each.tokens_decoded for each in decode) and prefill:
        assert sum(each.tokens_prefilled for each in prefill) > 0
        assert sum(each.kv_bytes_sent for each in prefill) > 0
