"""By which ways KV goes from worker to worker: what the configuration asks for and the machine gives."""

from __future__ import annotations

import logging

from cluster.config import TransportName
from engine.kv_pool import KVPool
from kv_transfer.blocks import pool_blocks
from kv_transfer.shared_pool import PoolMemory
from kv_transfer.transport.base import FrameSink, PushEndpoint, Transport
from kv_transfer.transport.collective import CollectiveTransport
from kv_transfer.transport.collective_server import CollectiveStreams
from kv_transfer.transport.grpc import GrpcPushServer, GrpcTransport
from kv_transfer.transport.several import SeveralEndpoints
from kv_transfer.transport.shm import ShmTransport
from kv_transfer.transport.shm_server import ShmPushServer
from trust.trust import Trust

log = logging.getLogger(__name__)
# Those for which the pool must lie in memory that can be shared.
SHARES_MEMORY = frozenset({TransportName.AUTO, TransportName.SHM})


def make_transports(
    trust: Trust, pool: KVPool, connect_timeout_s: float, is_near_only: bool = True
) -> tuple[Transport, ...]:
    """A prefill worker's, beside gRPC: it can use every way, and decode workers say which they have.
    `is_near_only`: no pairs with other hosts."""
    control = GrpcTransport(trust, pool.block_bytes, connect_timeout_s)
    return (
        ShmTransport(pool.layout, connect_timeout_s),
        CollectiveTransport(pool_blocks(pool), control, is_near_only, connect_timeout_s),
    )


def make_endpoint(
    trust: Trust, transport: TransportName, pool: KVPool, memory: PoolMemory, host: str, sink: FrameSink
) -> PushEndpoint:
    """A decode worker's. `memory` is what its pool was taken from. Raises RuntimeError where the one way that
    was asked for cannot be had, or a port is taken."""
    if transport is TransportName.SHM:
        return _by_shm(pool, memory, sink)
    endpoints: list[PushEndpoint] = []
    if transport is TransportName.AUTO:
        try:
            endpoints.append(_by_shm(pool, memory, sink))
        except RuntimeError as error:
            log.warning("%s; prefill workers on this host will use another way", error)
    is_on_gpu = pool.tensor.device.type == "cuda"
    has_pairs = transport is TransportName.COLLECTIVE or (transport is TransportName.AUTO and is_on_gpu)
    kinds = [CollectiveStreams(sink, pool_blocks(pool), host)] if has_pairs else []
    endpoints.append(GrpcPushServer(sink, trust, host, 0, pool.block_bytes, kinds=kinds))
    return SeveralEndpoints(endpoints)


def _by_shm(pool: KVPool, memory: PoolMemory, sink: FrameSink) -> PushEndpoint:
    if memory.shared is None:
        raise RuntimeError(f"KV cannot come by shm: {memory.why_not}")
    try:
        return ShmPushServer(sink, memory.shared, pool.num_blocks)
    except OSError as error:
        raise RuntimeError(f"KV cannot come by shm: {error}") from error
