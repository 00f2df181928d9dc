"""From a WorkerSpec to a worker that can be started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from cluster.config import TransportName
from cluster.control.worker_handle import WorkerSpec
from cluster.nodes.network import in_url
from decode_worker.config import DecodeConfig
from decode_worker.worker import DecodeWorker
from engine.engine import Engine
from engine.loop import EngineLoop
from engine.threads import use_threads
from kv_transfer.send_queue import SenderConfig
from kv_transfer.transport.base import FrameSink, PushEndpoint
from kv_transfer.transport.grpc import GrpcPushServer
from kv_transfer.verify import Verify
from prefill_worker.config import PrefillConfig
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


def make_worker(spec: WorkerSpec, loop: EngineLoop, host: str) -> RoleWorker:
    """On the asyncio loop that is to serve it. `host` is where it listens."""
    if spec.role is Role.PREFILL:
        sender = SenderConfig(verify=_verify(spec))
        return PrefillWorker(spec.worker_id, loop, in_url(host), config=PrefillConfig(sender=sender))
    receives_by = _ENDPOINTS[spec.kv_transfer.transport]
    return DecodeWorker(
        spec.worker_id,
        loop,
        in_url(host),
        role=spec.role,
        config=DecodeConfig(verify=_verify(spec)),
        endpoint=lambda sink: receives_by(sink, in_url(host), loop.engine.layout.block_bytes),
    )


def _verify(spec: WorkerSpec) -> Verify | None:
    chosen = spec.kv_transfer.verify
    return None if chosen == "auto" else Verify[chosen.upper()]


def _by_grpc(sink: FrameSink, host: str, block_bytes: int) -> PushEndpoint:
    return GrpcPushServer(sink, host, 0, block_bytes)


# The decode worker chooses: each reservation names the transport by which its KV is to come.
_ENDPOINTS: dict[TransportName, Callable[[FrameSink, str, int], PushEndpoint]] = {
    TransportName.AUTO: _by_grpc,
    TransportName.GRPC: _by_grpc,
}
