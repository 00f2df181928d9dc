"""The router's own cost: tokens a second through gRPC and HTTP on one core, and what it adds to TTFT.

    python -m benchmarks.router_overhead
    python -m benchmarks.router_overhead --streams 200 --steps 25,40 --seconds 10 --router-core 1

A router runs on a core of its own, on workers that compute nothing (benchmarks/stub_workers.py); they and
the clients have another core. Each of `--streams` clients asks, reads a stream to its end, waits for up to
the time of a step, and asks again.
A run offers streams times steps tokens a second; one that the router keeps up with brings as many, each in an
event of its own. "Core" is the CPU time that the router took of its core. TTFT is the client's, from its
request to its first token. "Added" is its median less that of asking the prefill worker directly, which the
same process does meanwhile: with one request at a time, and with all of the run's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from dataclasses import dataclass
from statistics import median

import grpc
import psutil

from benchmarks.bare_clients import Ask, Counts, directly, over_grpc, over_http
from benchmarks.stub_cluster import Served, stub_cluster

WARM_UP_S = 2.0
NUM_ALONE = 200
HEADINGS = (
    "front",
    "offered tok/s",
    "tok/s",
    "tokens an event",
    "core",
    "µs a token",
    "TTFT p50 ms",
    "TTFT p99 ms",
    "added ms",
    "added ms, one at a time",
)


@dataclass(frozen=True)
class Run:
    front: str
    offered: float
    tokens_per_s: float
    tokens_per_event: float
    core_share: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    added_ms: float
    added_alone_ms: float

    def cells(self) -> tuple[str, ...]:
        each_us = 1e6 * self.core_share / self.tokens_per_s
        return (
            self.front,
            f"{self.offered:,.0f}",
            f"{self.tokens_per_s:,.0f}",
            f"{self.tokens_per_event:.2f}",
            f"{self.core_share:.0%}",
            f"{each_us:.0f}",
            f"{self.ttft_p50_ms:.1f}",
            f"{self.ttft_p99_ms:.1f}",
            f"{self.added_ms:.1f}",
            f"{self.added_alone_ms:.1f}",
        )


async def measure(front: str, steps: float, served: Served, ask: Ask, a: argparse.Namespace) -> Run:
    router = served.process
    direct_alone = await directly(served.stub, 0.0, NUM_ALONE)
    alone = Counts()
    for _ in range(NUM_ALONE):
        await ask(1, alone)
    counts = Counts()
    stopping = asyncio.Event()

    async def client(number: int) -> None:
        # One after the other, so that they do not all end and begin in one step.
        await asyncio.sleep(WARM_UP_S * number / a.streams)
        while not stopping.is_set():
            await ask(a.tokens, counts)
            # People do not come when a step has just ended, and all its tokens are on their way.
            await asyncio.sleep(random.uniform(0.0, 1 / steps))

    clients = [asyncio.create_task(client(number)) for number in range(a.streams)]
    await asyncio.sleep(2 * WARM_UP_S)
    before, cpu_before, begun = (counts.num_tokens, counts.num_events), _cpu_s(router), time.perf_counter()
    counts.ttfts_s.clear()
    # Not in step with the decode worker's.
    direct = await directly(served.stub, a.seconds / NUM_ALONE, NUM_ALONE)
    seconds = time.perf_counter() - begun
    num_tokens, num_events = counts.num_tokens - before[0], counts.num_events - before[1]
    cpu_s = _cpu_s(router) - cpu_before
    ttfts = sorted(counts.ttfts_s)
    stopping.set()
    await asyncio.gather(*clients)
    return Run(
        front=front,
        offered=a.streams * steps,
        tokens_per_s=num_tokens / seconds,
        tokens_per_event=num_tokens / num_events,
        core_share=cpu_s / seconds,
        ttft_p50_ms=1000 * median(ttfts),
        ttft_p99_ms=1000 * ttfts[int(0.99 * (len(ttfts) - 1))],
        added_ms=1000 * median(ttfts) - median(direct),
        added_alone_ms=1000 * median(alone.ttfts_s) - median(direct_alone),
    )


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def run(front: str, steps: float, served: Served, a: argparse.Namespace) -> Run:
    async with grpc.aio.insecure_channel(served.grpc) as channel:
        ask = over_grpc(channel) if front == "grpc" else over_http(served.http)
        return await measure(front, steps, served, ask, a)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fronts", default="grpc,http")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=100, help="of one answer")
    parser.add_argument("--steps", default="25", help="of the decode worker a second; several with commas")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--router-core", type=int, default=1)
    parser.add_argument("--load-core", type=int, default=0)
    a = parser.parse_args()
    os.sched_setaffinity(0, {a.load_core})
    print("| " + " | ".join(HEADINGS) + " |\n|" + "---|" * len(HEADINGS))
    for front in a.fronts.split(","):
        for steps in map(float, a.steps.split(",")):
            with stub_cluster(steps, a.streams, a.router_core, a.load_core) as served:
                print("| " + " | ".join(asyncio.run(run(front, steps, served, a)).cells()) + " |", flush=True)


if __name__ == "__main__":
    main()
