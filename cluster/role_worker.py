"""From a WorkerSpec to a worker that can be started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from cluster.worker_handle import WorkerSpec
from decode_worker.worker import DecodeWorker
from engine.engine import Engine
from engine.loop import EngineLoop
from engine.threads import use_threads
from prefill_worker.worker import PrefillWorker
from worker.identity import Role


class RoleWorker(Protocol):
    """What both roles offer."""

    async def start(self) -> str:
        """Serve; returns host:port."""

    async def drain(self) -> None:
        """No new work; returns when nothing is left, KV not yet fetched included."""

    async def stop(self) -> None:
        """End whatever is left."""


def load_engine(spec: WorkerSpec, progress: Callable[[str], None]) -> EngineLoop:
    """Blocks while the model loads. Raises ModelError and whatever the machine has to say."""
    use_threads(spec.pool.threads)
    loop = EngineLoop(Engine.load(spec.model, spec.pool.engine, progress))
    loop.start()
    return loop


def make_worker(spec: WorkerSpec, loop: EngineLoop) -> RoleWorker:
    """On the asyncio loop that is to serve it."""
    if spec.role is Role.PREFILL:
        return PrefillWorker(spec.worker_id, loop)
    return DecodeWorker(spec.worker_id, loop, role=spec.role)
