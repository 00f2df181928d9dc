"""Values about workers, as the controller's snapshots and the workers' own reports tell them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pdserve.v1 import cluster_pb2


class Role(Enum):
    PREFILL = cluster_pb2.ROLE_PREFILL
    DECODE = cluster_pb2.ROLE_DECODE
    COLOCATED = cluster_pb2.ROLE_COLOCATED


class WorkerState(Enum):
    STARTING = cluster_pb2.WORKER_STATE_STARTING
    READY = cluster_pb2.WORKER_STATE_READY
    UNHEALTHY = cluster_pb2.WORKER_STATE_UNHEALTHY
    DRAINING = cluster_pb2.WORKER_STATE_DRAINING
    STOPPED = cluster_pb2.WORKER_STATE_STOPPED
    DEAD = cluster_pb2.WORKER_STATE_DEAD


@dataclass(frozen=True, slots=True)
class SequenceKey:
    """Names one attempt on the wire."""

    transfer_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Fixed from the worker's start."""

    id: str
    instance_id: str
    role: Role
    address: str
    block_size: int
    kv_blocks_total: int
    max_model_len: int
    max_sequence_tokens: int
    dtype: str


@dataclass(frozen=True, slots=True)
class LoadReport:
    num_running: int
    num_waiting: int
    num_reservations: int
    kv_blocks_free: int
    queued_prompt_tokens: int

    def has_more_room_than(self, other: LoadReport) -> bool:
        return (
            self.kv_blocks_free > other.kv_blocks_free
            or self.num_running < other.num_running
            or self.num_reservations < other.num_reservations
        )


def info_of(message: cluster_pb2.WorkerStatus) -> WorkerInfo:
    limits = message.limits
    return WorkerInfo(
        id=message.id,
        instance_id=message.instance_id,
        role=Role(message.role),
        address=message.address,
        block_size=limits.block_size,
        kv_blocks_total=limits.kv_blocks_total,
        max_model_len=limits.max_model_len,
        max_sequence_tokens=limits.max_sequence_tokens,
        dtype=limits.layout.dtype,
    )


def load_of(message: cluster_pb2.WorkerLoad) -> LoadReport:
    return LoadReport(
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        num_reservations=message.num_reservations,
        kv_blocks_free=message.kv_blocks_free,
        queued_prompt_tokens=message.queued_prompt_tokens,
    )
