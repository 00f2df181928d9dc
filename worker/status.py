"""A worker's report of itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

import psutil

from engine.config import SpeculativeConfig
from engine.engine import Engine
from engine.request import EngineLoad
from kv_transfer.counters import TransportCounters
from kv_transfer.quarantine import Quarantine
from kv_transfer.transport.base import InboundStream
from pdserve.v1 import cluster_pb2
from worker.identity import Role, WorkerIdentity, WorkerState
from worker.messages import ROLES, worker_limits

_STATES = {
    WorkerState.READY: cluster_pb2.WORKER_STATE_READY,
    WorkerState.DRAINING: cluster_pb2.WORKER_STATE_DRAINING,
    WorkerState.STOPPED: cluster_pb2.WORKER_STATE_STOPPED,
    WorkerState.FAILED: cluster_pb2.WORKER_STATE_UNHEALTHY,
}


def worker_status(
    identity: WorkerIdentity,
    state: WorkerState,
    detail: str,
    address: str,
    engine: Engine,
    load: cluster_pb2.WorkerLoad,
    counters: cluster_pb2.WorkerCounters,
) -> cluster_pb2.WorkerStatus:
    """Reads of the engine only what is fixed from its start, so any thread may call this."""
    return cluster_pb2.WorkerStatus(
        id=identity.worker_id,
        instance_id=identity.instance_id,
        role=ROLES[identity.role],
        state=_STATES[state],
        detail=detail,
        address=address,
        pid=identity.pid,
        node=identity.node,
        device=engine.device,
        limits=worker_limits(engine.limits, engine.layout, engine.num_threads),
        load=load,
        counters=counters,
        kernels=engine.kernels,
        # A prefill worker's sequences end before there is anything to draft.
        speculation="" if identity.role is Role.PREFILL else _told(engine.speculation),
    )


def _told(speculation: SpeculativeConfig | None) -> str:
    return "" if speculation is None else f"{speculation.method}, up to {speculation.max_tokens} tokens"


def transfer_counters(counters: TransportCounters) -> list[cluster_pb2.TransferCounters]:
    return [
        cluster_pb2.TransferCounters(transport=transport, **asdict(counts))
        for transport, counts in counters.copy().items()
    ]


def quarantine_messages(quarantines: Iterable[Quarantine]) -> list[cluster_pb2.Quarantine]:
    """Those that a process of this node stands behind."""
    return [
        cluster_pb2.Quarantine(
            sender_pid=each.stream.sender_pid, num_blocks=each.num_blocks, age_ms=round(each.age_s * 1000)
        )
        for each in quarantines
        if isinstance(each.stream, InboundStream) and each.stream.sender_pid is not None
    ]


def engine_counters(load: EngineLoad) -> cluster_pb2.WorkerCounters:
    return cluster_pb2.WorkerCounters(
        tokens_prefilled=load.tokens_prefilled,
        tokens_decoded=load.tokens_decoded,
        num_preemptions=load.num_preemptions,
        draft_tokens=load.draft_tokens,
        accepted_draft_tokens=load.accepted_draft_tokens,
        rss_bytes=psutil.Process().memory_info().rss,
    )
