"""Hand-overs of real requests on one prefill and one decode worker, one request at a time: from the first
token's drawing on P until D has all KV, and until D's first step with the sequence begins.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.config import ModelConfig
from kv_transfer.layout import KVLayout
from pdserve.bench.errors import BenchError
from pdserve.bench.own_cluster import own_cluster
from pdserve.bench.transfer_plan import Plan
from pdserve.client import Client, Timings

NUM_NEW_TOKENS = 4
Tell = Callable[[], None]


@dataclass(frozen=True, slots=True)
class HandOverResult:
    """`ready`: until all KV is there. `start`: until the first step begins. Milliseconds."""

    transport: str
    num_tokens: int
    num_requests: int
    ready_p50_ms: float
    ready_p99_ms: float
    start_p50_ms: float
    start_p99_ms: float
    # Of all requests together; computed are the blocks of their prompts.
    bytes_hidden: int
    bytes_shipped: int
    bytes_computed: int

    @property
    def hidden_share(self) -> float:
        return self.bytes_hidden / self.bytes_shipped


def measure_handovers(
    transport: str, model: ModelConfig, layout: KVLayout, plan: Plan, say: Callable[[str], None], tell: Tell
) -> list[HandOverResult]:
    """`tell` is called after each request. Raises BenchError, PdserveError."""
    with own_cluster(transport, _config(transport, model, plan), say) as address:
        say(f"hand-over by {transport}")
        return asyncio.run(_measure(transport, address, layout, plan, tell))


def _config(transport: str, model: ModelConfig, plan: Plan) -> Mapping[str, object]:
    engine = {"max_num_batched_tokens": plan.max_num_batched_tokens}
    return {
        "model": model.model_dump(exclude_none=True),
        "pools": {"prefill": {"engine": engine}, "decode": {"engine": engine}},
        "kv_transfer": {"transport": transport},
    }


async def _measure(
    transport: str, address: str, layout: KVLayout, plan: Plan, tell: Tell
) -> list[HandOverResult]:
    rng = random.Random(0)
    results: list[HandOverResult] = []
    async with Client(address) as client:
        vocab_size = (await client.get_model()).vocab_size
        for num_tokens in plan.tokens:
            asked: list[Timings] = []
            for number in range(-plan.num_warm_requests, plan.num_requests(num_tokens)):
                prompt = [rng.randrange(vocab_size) for _ in range(num_tokens)]
                timings = await _ask(client, prompt)
                if number >= 0:
                    asked.append(timings)
                    tell()
            results.append(_result(transport, num_tokens, asked, layout))
        await _check_route(client, transport)
    return results


async def _ask(client: Client, prompt: Sequence[int]) -> Timings:
    """Prompts are new to the prefix caches."""
    done = await client.generate(prompt, max_tokens=NUM_NEW_TOKENS, temperature=0, ignore_eos=True)
    if not done.timings.transfer_bytes:
        raise BenchError("no KV was shipped for a request")
    return done.timings


async def _check_route(client: Client, transport: str) -> None:
    cluster = await client.get_cluster()
    ways = {
        route.transport for pool in cluster.pools for worker in pool.workers for route in worker.kv_routes
    }
    if ways != {transport}:
        raise BenchError(f"KV went by {', '.join(sorted(ways)) or 'no way'}, not by {transport}")


def _result(transport: str, num_tokens: int, asked: list[Timings], layout: KVLayout) -> HandOverResult:
    ready = sorted(each.handover_ms for each in asked)
    start = sorted(each.decode_start_ms for each in asked)
    return HandOverResult(
        transport=transport,
        num_tokens=num_tokens,
        num_requests=len(asked),
        ready_p50_ms=_percentile(ready, 50),
        ready_p99_ms=_percentile(ready, 99),
        start_p50_ms=_percentile(start, 50),
        start_p99_ms=_percentile(start, 99),
        bytes_hidden=sum(each.hidden_bytes for each in asked),
        bytes_shipped=sum(each.transfer_bytes for each in asked),
        bytes_computed=len(asked) * layout.num_blocks_for(num_tokens) * layout.block_bytes,
    )


def _percentile(ordered: Sequence[float], percent: int) -> float:
    """The smallest value that so many percent do not exceed: of few values the 99th is the largest."""
    return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]
