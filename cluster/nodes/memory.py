"""How much memory the parts of a cluster take: estimates, for `pdserve check`."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.config import PoolConfig
from engine.config import DEFAULT_KV_CACHE_BYTES
from engine.model_facts import PROCESS_BYTES, ModelFacts
from worker.identity import Role

# Measured, idle: a Ray of our own; the controller; the router and the actor that keeps it.
OWN_RAY_BYTES = 350 * 2**20
CONTROL_BYTES = 300 * 2**20
# Each further router, with the actor that keeps it.
ROUTER_BYTES = 200 * 2**20
# What CUDA and its libraries take of the host's memory in each process.
CUDA_HOST_BYTES = 2 * 2**30


@dataclass(frozen=True, slots=True)
class WorkerEstimate:
    """One worker of a pool."""

    role: Role
    device: str  # "cpu" or "cuda": where weights, KV and working memory are
    dtype: str
    weights_bytes: int
    kv_bytes: int
    working_bytes: int
    process_bytes: int
    num_blocks: int
    # The longest sequence that its KV pool can hold.
    num_tokens: int

    @property
    def device_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.working_bytes

    @property
    def host_bytes(self) -> int:
        return self.process_bytes + (self.device_bytes if self.device == "cpu" else 0)


def estimate(
    role: Role, pool: PoolConfig, facts: ModelFacts, wanted_dtype: str, device: str
) -> WorkerEstimate:
    dtype = facts.dtype(wanted_dtype, is_cuda=device == "cuda")
    block_bytes = facts.layout(pool.engine.block_size, dtype).block_bytes
    num_blocks = pool.engine.num_blocks or (pool.engine.kv_cache or DEFAULT_KV_CACHE_BYTES) // block_bytes
    return WorkerEstimate(
        role=role,
        device=device,
        dtype=dtype,
        weights_bytes=facts.weights_bytes(dtype),
        kv_bytes=num_blocks * block_bytes,
        working_bytes=facts.working_bytes(pool.engine, dtype),
        process_bytes=PROCESS_BYTES + (CUDA_HOST_BYTES if device == "cuda" else 0),
        num_blocks=num_blocks,
        num_tokens=num_blocks * pool.engine.block_size,
    )
