"""What becomes of clients' token streams while KV arrives at the decode worker that writes them.

    python benchmarks/smooth_streams.py
    python benchmarks/smooth_streams.py --transports shm --mb-s 180,720 --rounds 8

For each transport a 1P1D cluster of its own; a few streams run on it, and another process pushes KV of
512-token prompts into the decode worker's pool, at a paced rate. Quiet and loaded turns follow each other on
the same streams, in changing order. A gap is the time between two of a stream's deltas at the client. Prints
a Markdown table, and how fast the cluster's prefill worker was: its KV is what one worker brings by nature.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from rich.console import Console

from cluster.state import cluster_folder
from cluster.trusted import SECRET_FILE
from pdserve import Client
from pdserve.bench.arriving_kv import Order, Settings
from pdserve.bench.child import trusted_child
from pdserve.bench.interrupted import tidily
from pdserve.bench.own_cluster import own_cluster
from pdserve.bench.transfer_ends import TRANSPORTS
from pdserve.client import Delta, Finished, Role
from trust.secret import Secret, read_secret

ARRIVING_TOKENS = 512
CONTEXT = 64
MAX_NEW_TOKENS = 3500
# Of a turn's beginning: left out, because its first hand-over makes connections.
SETTLE_S = 0.3
console = Console(stderr=True)


@dataclass(slots=True)
class Gaps:
    """Milliseconds, of all streams."""

    quiet: list[float] = field(default_factory=list)
    loaded: list[float] = field(default_factory=list)
    bytes_s: list[float] = field(default_factory=list)


class Arriving:
    """The process that pushes; an order keeps it at it for a turn."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.answer()  # it is ready

    def order(self, order: Order) -> None:
        if self._process.stdin is None:
            raise ValueError("its pipes are needed")
        self._process.stdin.write(order.dump() + "\n")
        self._process.stdin.flush()

    def answer(self) -> float:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise RuntimeError("the process that pushes KV has ended")
        return float(json.loads(line))


@contextmanager
def arriving(settings: Settings, secret: Secret) -> Iterator[Arriving]:
    with trusted_child("pdserve.bench.arriving_kv", settings.dump(), secret) as process:
        yield Arriving(process)


class Streams:
    """Answers that are being written, and when each of their tokens came."""

    def __init__(self, client: Client, count: int) -> None:
        self._rng = random.Random(0)
        self._client = client
        self._arrivals: list[list[float]] = [[] for _ in range(count)]
        self._begun = [asyncio.Event() for _ in range(count)]
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        self._tasks = [asyncio.create_task(self._read(index)) for index in range(len(self._arrivals))]
        begun = asyncio.gather(*(event.wait() for event in self._begun))
        await asyncio.wait({begun, *self._tasks}, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        self.check()

    def check(self) -> None:
        """Raises what a stream died of, or RuntimeError where one has ended or has not begun."""
        for task, event in zip(self._tasks, self._begun, strict=True):
            if task.done():
                task.result()
            if task.done() or not event.is_set():
                raise RuntimeError("a stream is not running")

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    def gaps(self, begin: float, end: float) -> list[float]:
        cut = [times[bisect_left(times, begin) : bisect_right(times, end)] for times in self._arrivals]
        return [1000 * (later - earlier) for times in cut for earlier, later in pairwise(times)]

    async def _read(self, index: int) -> None:
        prompt = [self._rng.randrange(1000, 20000) for _ in range(CONTEXT)]
        events = self._client.generate_stream(
            prompt, max_tokens=MAX_NEW_TOKENS, temperature=0, ignore_eos=True, timeout=600
        )
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Delta):
                    self._arrivals[index].append(time.perf_counter())
                    if len(self._arrivals[index]) == 8:
                        self._begun[index].set()


async def turn(streams: Streams, seconds: float) -> list[float]:
    await asyncio.sleep(SETTLE_S)
    began = time.perf_counter()
    await asyncio.sleep(seconds)
    streams.check()
    return streams.gaps(began, time.perf_counter())


async def press(streams: Streams, source: Arriving, bytes_s: float, seconds: float, into: Gaps) -> None:
    source.order(Order(bytes_s, SETTLE_S + seconds))
    into.loaded += await turn(streams, seconds)
    into.bytes_s.append(await asyncio.to_thread(source.answer))


async def measure(
    client: Client, source: Arriving, rates: Sequence[float], options: argparse.Namespace
) -> dict[float, Gaps]:
    found = {rate: Gaps() for rate in rates}
    for number in range(options.rounds):
        streams = Streams(client, options.streams)
        await streams.begin()
        try:
            for rate, gaps in found.items():
                console.log(f"round {number + 1} of {options.rounds}, {rate / 1e6:.0f} MB/s")
                if number % 2:
                    await press(streams, source, rate, options.seconds, gaps)
                gaps.quiet += await turn(streams, options.seconds)
                if number % 2 == 0:
                    await press(streams, source, rate, options.seconds, gaps)
        finally:
            await streams.end()
    return found


async def prefill_tok_s(client: Client) -> float:
    """Of one idle worker, its best chunk size: what it brings by nature."""
    rng, rates = random.Random(1), []
    for _ in range(3):
        prompt = [rng.randrange(1000, 20000) for _ in range(ARRIVING_TOKENS)]
        async for event in client.generate_stream(prompt, max_tokens=2, temperature=0, ignore_eos=True):
            if isinstance(event, Finished):
                rates.append(1000 * len(prompt) / event.timings.prefill_ms)
    return median(rates)


async def measure_transport(
    address: str, transport: str, rates: Sequence[float], options: argparse.Namespace
) -> None:
    async with Client(address) as client:
        tok_s = await prefill_tok_s(client)
        cluster = await client.get_cluster()
        pool = cluster.pool(Role.DECODE)
        if pool is None:
            raise RuntimeError("there is no decode worker")
        secret = read_secret(cluster_folder(cluster.name) / SECRET_FILE)
        settings = Settings(pool.workers[0].address, transport, ARRIVING_TOKENS)
        with arriving(settings, secret) as source:
            found = await measure(client, source, rates, options)
    for gaps in found.values():
        print(row(transport, tok_s, gaps), flush=True)


def row(transport: str, tok_s: float, gaps: Gaps) -> str:
    cells = [f"{a:.1f} → {b:.1f} | {b / a:.2f}" for a, b in _figures(gaps)]
    return f"| {transport} | {tok_s:.0f} | {median(gaps.bytes_s) / 1e6:.0f} | {' | '.join(cells)} |"


def _figures(gaps: Gaps) -> Iterator[tuple[float, float]]:
    for percent in (50, 99, 100):
        yield percentile(gaps.quiet, percent), percentile(gaps.loaded, percent)


def percentile(values: Sequence[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transports", default=",".join(TRANSPORTS), help="(default: %(default)s)")
    parser.add_argument("--mb-s", default="180", help="rates of KV, comma-separated (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a turn (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=4, help="(default: %(default)s)")
    options = parser.parse_args()
    rates = [1e6 * float(rate) for rate in options.mb_s.split(",")]
    print("| transport | prefill tok/s | KV MB/s | gap p50 quiet → loaded, ms | | p99 | | max | |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for transport in options.transports.split(","):
        config = {"pools": {"prefill": {}, "decode": {}}, "kv_transfer": {"transport": transport}}
        with own_cluster(transport, config, console.log) as address:
            asyncio.run(measure_transport(address, transport, rates, options))


if __name__ == "__main__":
    sys.exit(tidily(main))
