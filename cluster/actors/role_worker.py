"""From a WorkerSpec to a worker that can be started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from cluster.actors.kv_ways import SHARES_MEMORY, make_endpoint, make_transports
from cluster.config import TransportName, device_for
from cluster.control.worker_handle import WorkerSpec
from cluster.nodes.network import in_url
from decode_worker.config import DecodeConfig
from decode_worker.worker import DecodeWorker
from engine.engine import Engine
from engine.kv_pool import AllocateMemory, allocate_memory
from engine.loop import EngineLoop
from engine.threads import use_threads
from kv_transfer.send_queue import SenderConfig
from kv_transfer.shared_pool import PoolMemory
from kv_transfer.verify import Verify
from observability.tracing import Service, make_tracer
from prefill_worker.config import PrefillConfig
from prefill_worker.worker import PrefillWorker
from trust.trust import Trust
from worker.identity import Role


class RoleWorker(Protocol):
    """What both roles offer."""

    async def start(self) -> str:
        """Serve; returns host:port."""

    async def drain(self) -> None:
        """No new work; returns when nothing is left, KV not yet fetched included."""

    async def stop(self) -> None:
        """End whatever is left."""


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """It runs. `memory` is what its pool was taken from."""

    loop: EngineLoop
    memory: PoolMemory


def load_engine(spec: WorkerSpec, progress: Callable[[str], None]) -> LoadedEngine:
    """Blocks while the model loads. Raises ModelError and whatever the machine has to say."""
    use_threads(spec.pool.threads)
    memory = PoolMemory()
    is_shared = spec.role is not Role.PREFILL and spec.kv_transfer.transport in SHARES_MEMORY
    allocate: AllocateMemory = memory if is_shared else allocate_memory
    model = device_for(spec.model, spec.pool)
    loop = EngineLoop(Engine.load(model, spec.pool.engine, progress, allocate))
    loop.start()
    return LoadedEngine(loop, memory)


def make_worker(spec: WorkerSpec, loaded: LoadedEngine, trust: Trust, host: str) -> RoleWorker:
    """On the asyncio loop that is to serve it. `host` is where it listens. Raises TrustError."""
    loop, engine = loaded.loop, loaded.loop.engine
    service = Service(spec.role.value, spec.cluster, spec.worker_id)
    tracer = make_tracer(spec.observability.traces, service)
    if spec.role is Role.PREFILL:
        config = PrefillConfig(sender=SenderConfig(verify=_verify(spec)))
        kv = spec.kv_transfer
        is_near_only = kv.transport is TransportName.AUTO and not kv.trusted_network
        transports = make_transports(trust, engine.pool, config.connect_timeout_s, is_near_only)
        return PrefillWorker(
            spec.worker_id, loop, trust, in_url(host), config=config, transports=transports, tracer=tracer
        )
    where = in_url(host)
    return DecodeWorker(
        spec.worker_id,
        loop,
        trust,
        where,
        role=spec.role,
        config=DecodeConfig(verify=_verify(spec)),
        endpoint=partial(make_endpoint, trust, spec.kv_transfer.transport, engine.pool, loaded.memory, where),
        tracer=tracer,
    )


def _verify(spec: WorkerSpec) -> Verify | None:
    chosen = spec.kv_transfer.verify
    return None if chosen == "auto" else Verify[chosen.upper()]
