"""Clients that do as little as can be: what they cost is not the router's."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import grpc

from pdserve.v1 import generation_pb2, generation_pb2_grpc, worker_pb2, worker_pb2_grpc

PROMPT = list(range(128))


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
