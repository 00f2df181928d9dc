"""The router's own cost: tokens a second through gRPC and HTTP on one core, and what it adds to TTFT.

    python benchmarks/router_overhead.py
    python benchmarks/router_overhead.py --streams 200 --steps 25,40 --seconds 10 --router-core 1

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
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TextIO

import grpc
import psutil
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pdserve.v1 import generation_pb2, generation_pb2_grpc, worker_pb2, worker_pb2_grpc
from trust.secret import Secret

ROOT = Path(__file__).parents[1]
PROMPT = list(range(128))
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


@dataclass
class Counts:
    num_tokens: int = 0
    num_events: int = 0
    ttfts_s: list[float] = field(default_factory=list)


Ask = Callable[[int, Counts], Awaitable[None]]
"""Asks for so many tokens and reads them all."""


def over_grpc(channel: grpc.aio.Channel) -> Ask:
    stub = generation_pb2_grpc.GenerationStub(channel)

    async def ask(max_tokens: int, counts: Counts) -> None:
        request = generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=PROMPT),
            stop=generation_pb2.StopConditions(max_tokens=max_tokens, ignore_eos=True),
        )
        asked_at, is_first = time.perf_counter(), True
        async for message in stub.GenerateStream(request):
            if message.HasField("delta"):
                if is_first:
                    counts.ttfts_s.append(time.perf_counter() - asked_at)
                    is_first = False
                counts.num_events += 1
                counts.num_tokens += len(message.delta.token_ids)

    return ask


def over_http(address: str) -> Ask:
    host, _, port = address.rpartition(":")
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(max_tokens: int, counts: Counts) -> None:
        body = json.dumps({"prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True, "stream": True})
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        asked_at, is_first = time.perf_counter(), True
        reader, writer = idle.pop() if idle else await asyncio.open_connection(host, int(port))
        writer.write((head + body).encode())
        async for event in _events(reader):
            text = event.partition(b'"text":"')[2].partition(b'"')[0]
            if text:
                if is_first:
                    counts.ttfts_s.append(time.perf_counter() - asked_at)
                    is_first = False
                counts.num_events += 1
                counts.num_tokens += len(text)
        idle.append((reader, writer))

    return ask


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Found with as little work as can be: what they cost here is not the router's."""
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200 "):
        raise RuntimeError(f"the router answered {head!r}")
    rest = b""
    while not rest.endswith(b"0\r\n\r\n"):
        read = await reader.read(1 << 16)
        if not read:
            raise RuntimeError("the router closed the connection")
        *events, rest = (rest + read).split(b"\n\n")
        for event in events:
            yield event


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


@dataclass(frozen=True)
class Served:
    stub: str
    grpc: str
    http: str
    process: psutil.Process


@contextmanager
def child(core: int, log: TextIO, *command: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """A process of ours on that core, and the line of JSON that it says first."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    finally:
        os.sched_setaffinity(0, mine)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        if not said:
            raise RuntimeError(f"{command[0]} ended: {Path(log.name).read_text()}")
        yield process, json.loads(said)
    finally:
        process.terminate()
        process.wait(10)


def write_model(folder: Path) -> None:
    """A tokenizer of single bytes: each token is one character."""
    vocabulary = {
        character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(vocabulary)}))


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


async def directly(address: str, pause_s: float, num: int) -> list[float]:
    """Milliseconds until a prefill worker's first token, without a router."""
    took = []
    async with grpc.aio.insecure_channel(address) as channel:
        stub = worker_pb2_grpc.PrefillWorkerStub(channel)
        for number in range(num):
            await asyncio.sleep(pause_s)
            spec = worker_pb2.SequenceSpec(transfer_id=str(number), prompt_token_ids=PROMPT)
            spec.stop.max_tokens = 1
            asked_at = time.perf_counter()
            async for _ in stub.Prefill(worker_pb2.PrefillRequest(sequence=spec)):
                took.append(1000 * (time.perf_counter() - asked_at))
    return took


@contextmanager
def serving(steps: float, a: argparse.Namespace) -> Iterator[Served]:
    with tempfile.TemporaryDirectory() as name, open(Path(name, "log"), "w") as log:
        folder = Path(name)
        write_model(folder)
        with child(a.load_core, log, "benchmarks.stub_workers", "--step-ms", str(1000 / steps)) as (_, stub):
            config = {
                "grpc": "127.0.0.1:0",
                "http": "127.0.0.1:0",
                "cluster": "stub",
                "router_id": "router-0",
                "model": "stub",
                "model_dir": name,
                "control": stub["control"],
                "trust": {"secret": str(folder / "secret")},
                "max_queued_requests": 2 * a.streams,
            }
            Secret.fresh().write(folder / "secret")
            path = folder / "router.json"
            path.write_text(json.dumps(config))
            with child(a.router_core, log, "router", "--config", str(path)) as (process, router):
                yield Served(stub["control"], router["grpc"], router["http"], psutil.Process(process.pid))


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
            with serving(steps, a) as served:
                print("| " + " | ".join(asyncio.run(run(front, steps, served, a)).cells()) + " |", flush=True)


if __name__ == "__main__":
    main()
