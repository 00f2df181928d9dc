"""What is compared: each started on the same cores, with the same memory for KV, and ended again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
)
from pathlib import Path

from benchmarks.disagg_vs_colocated.cores import confined
from benchmarks.disagg_vs_colocated.round_robin import RoundRobin
from benchmarks.disagg_vs_colocated.settings import (
    AGING_S,
    CHUNK_TOKENS,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    MODEL,
    Ordering,
    System,
)
from benchmarks.disagg_vs_colocated.vllm_servers import vllm_servers
from pdserve.bench.own_cluster import own_cluster
from pdserve.bench.serve.client import Sampling, ServeClient
from pdserve.bench.serve.endpoint import Endpoint
from pdserve.bench.serve.grpc_client import GrpcClient
from pdserve.bench.serve.http_client import HttpClient

# Both cores together have so much for KV, of whatever shape.
_KV_MIB = 3072
_PREFILL_KV_MIB = 512
_TIMEOUT_S = 600.0

Open = Callable[[], AbstractAsyncContextManager[ServeClient]]
Say = Callable[[str], None]


@contextmanager
def running(
    system: System, order: Ordering, cores: Sequence[int], vllm_python: Path | None, say: Say
) -> Iterator[Open]:
    """Yields what opens a client of it. Raises BenchError."""
    if system is System.VLLM:
        if vllm_python is None:
            raise ValueError("vLLM wants its interpreter")
        with vllm_servers(vllm_python, cores, _KV_MIB // len(cores), say) as urls:
            yield lambda: _over_http(urls)
        return
    part = f"{system.value}-{order.value}"
    with ExitStack() as stack:
        with confined(cores):
            address = stack.enter_context(own_cluster(part, _config(system, order), say))
        yield lambda: _over_grpc(address)


def _config(system: System, order: Ordering) -> Mapping[str, object]:
    return {
        "model": {"id": MODEL, "max_model_len": MAX_MODEL_LEN},
        "router": {
            "queue_order": order.queue.value,
            "queue_aging_s": AGING_S,
            "prefill_backlog_tokens": order.backlog_tokens,
            "max_queued_requests": 1000,
        },
        "pools": {
            System.DISAGGREGATED: _one_each(order, prefill_threads=1),
            System.SHARING: _one_each(order, prefill_threads=2),
            System.COLOCATED: {"colocated": _pool(2, _KV_MIB // 2, order)},
        }[system],
    }


def _one_each(order: Ordering, prefill_threads: int) -> Mapping[str, object]:
    return {
        "prefill": _pool(1, _PREFILL_KV_MIB, order, prefill_threads),
        "decode": _pool(1, _KV_MIB - _PREFILL_KV_MIB, Ordering.FCFS),
    }


def _pool(replicas: int, kv_mib: int, order: Ordering, threads: int = 1) -> Mapping[str, object]:
    engine = {
        "kv_cache": f"{kv_mib}MiB",
        "max_num_batched_tokens": CHUNK_TOKENS,
        "max_num_seqs": MAX_NUM_SEQS,
        "prefill_order": order.prefill,
        "prefill_aging_s": AGING_S,
    }
    return {"replicas": replicas, "threads": threads, "engine": engine}


@asynccontextmanager
async def _over_grpc(address: str) -> AsyncIterator[ServeClient]:
    async with GrpcClient(address, Sampling(), _TIMEOUT_S) as client:
        yield client


@asynccontextmanager
async def _over_http(urls: Sequence[str]) -> AsyncIterator[ServeClient]:
    async with AsyncExitStack() as stack:
        clients = [HttpClient(Endpoint(url), Sampling(), _TIMEOUT_S) for url in urls]
        yield RoundRobin([await stack.enter_async_context(client) for client in clients])
