"""Connections that send without an end, too slowly, or never read: each is ended, and others are served."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from router.http import body, event_stream, protocol
from router.http.openai_api import TIMEOUT_HEADER
from tests.integration.http.raw import connect, get, post, read_answer, request
from tests.integration.router.harness import Cluster, running, until

WAIT_S = 20.0


@pytest_asyncio.fixture
async def cluster(model_dir: Path) -> AsyncIterator[Cluster]:
    async with running(model_dir, http="127.0.0.1:0") as cluster:
        yield cluster


def address_of(cluster: Cluster) -> str:
    address = cluster.server.http_address
    assert address is not None
    return address


async def is_closed(reader: asyncio.StreamReader) -> bool:
    try:
        while await asyncio.wait_for(reader.read(1 << 16), WAIT_S):
            pass
    except ConnectionError:
        pass
    return True


HEADS = {
    "one field": b"x: " + b"a" * 70_000,
    "many fields": b"a: b\r\n" * 12_000,
}


@pytest.mark.parametrize("name", HEADS)
async def test_a_head_that_is_too_large_is_a_431_and_the_end(cluster: Cluster, name: str) -> None:
    reader, writer = await connect(address_of(cluster))
    writer.write(b"GET /live HTTP/1.1\r\nhost: localhost\r\n")
    await writer.drain()
    # Sent apart: what came with the first bytes does not count.
    await asyncio.sleep(0.05)
    writer.write(HEADS[name])
    answer = await read_answer(reader)
    assert (answer.status, answer.error["code"]) == (431, "request_header_fields_too_large")
    assert await is_closed(reader)
    writer.close()
    assert (await get(address_of(cluster), "/live")).status == 200


CHUNKED = b"host: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
ENDLESS = {
    "a path": (b"GET /", b"a" * (1 << 16)),
    "trailers": (b"POST /v1/completions HTTP/1.1\r\n" + CHUNKED + b"0\r\n", b"a: b\r\n" * 10_000),
}


@pytest.mark.parametrize("name", ENDLESS)
async def test_what_has_no_end_is_cut(cluster: Cluster, name: str) -> None:
    begin, piece = ENDLESS[name]
    _, writer = await connect(address_of(cluster))

    async def write() -> None:
        writer.write(begin)
        for _ in range(1000):
            writer.write(piece)
            await writer.drain()

    with pytest.raises(ConnectionError):
        await asyncio.wait_for(write(), WAIT_S)
    writer.close()


async def test_a_body_of_tiny_chunks_is_taken(cluster: Cluster) -> None:
    text = json.dumps({"prompt": "x" * 20_000, "max_tokens": 1}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in text) + b"0\r\n\r\n"
    reader, writer = await connect(address_of(cluster))
    writer.write(b"POST /v1/completions HTTP/1.1\r\n" + CHUNKED)
    writer.write(chunks)
    assert (await read_answer(reader)).error["code"] == "context_length_exceeded"
    writer.close()


@pytest.mark.parametrize("sent", [b"", b"GET /live HTTP/1.1\r\nho"])
async def test_a_head_that_does_not_come_ends_its_connection(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_S", 0.1)
    reader, writer = await connect(address_of(cluster))
    writer.write(sent)
    assert await is_closed(reader)
    writer.close()


async def test_a_body_that_does_not_come_is_a_408_and_the_end(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "MAX_READ_S", 0.1)
    monkeypatch.setattr(protocol, "_LINGER_S", 0.1)
    reader, writer = await connect(address_of(cluster))
    writer.write(request("/v1/completions", b'{"prompt": "x"}')[:-3])
    assert (await read_answer(reader)).status == 408
    assert await is_closed(reader)
    writer.close()


async def test_large_bodies_share_their_room_and_small_ones_need_none(cluster: Cluster) -> None:
    begun = []
    large = request("/v1/completions", json.dumps({"prompt": "x" * (12 << 20)}).encode())
    for _ in range(20):
        reader, writer = await connect(address_of(cluster))
        writer.write(large[:-3])
        begun.append((reader, writer))
    answers = [asyncio.ensure_future(read_answer(reader)) for reader, _ in begun]
    first, waiting = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED, timeout=WAIT_S)
    for task in waiting:
        task.cancel()
    assert {task.result().status for task in first} == {429}
    assert all("retry-after" in task.result().headers for task in first)
    small = await post(address_of(cluster), "/v1/completions", b'{"prompt": [1], "max_tokens": 1}')
    assert small.status == 200
    for _, writer in begun:
        writer.close()


async def test_the_time_limit_begins_before_the_body(cluster: Cluster) -> None:
    reader, writer = await connect(address_of(cluster))
    writer.write(request("/v1/completions", b'{"prompt": "x"}', {TIMEOUT_HEADER: "0.1"})[:-3])
    assert (await read_answer(reader)).status == 408
    writer.close()


async def test_more_connections_than_are_taken_are_a_503(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "MAX_CONNECTIONS", 1)
    _, first = await connect(address_of(cluster))
    reader, second = await connect(address_of(cluster))
    assert (await read_answer(reader)).status == 503
    assert await is_closed(reader)
    first.close()
    second.close()


async def test_who_never_reads_is_cut_soon_after_the_deadline(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "_LAST_WORDS_S", 0.1)
    lost = asyncio.Event()
    connection_lost = protocol.BoundedProtocol.connection_lost

    def told(self: protocol.BoundedProtocol, exc: Exception | None) -> None:
        connection_lost(self, exc)
        lost.set()

    made = protocol.BoundedProtocol.connection_made

    def narrow(self: protocol.BoundedProtocol, transport: asyncio.Transport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(self, transport)

    monkeypatch.setattr(protocol.BoundedProtocol, "connection_lost", told)
    monkeypatch.setattr(protocol.BoundedProtocol, "connection_made", narrow)
    host, _, port = address_of(cluster).rpartition(":")
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        deaf.setblocking(False)
        await asyncio.get_running_loop().sock_connect(deaf, (host, int(port)))
        asked = {"prompt": [1], "max_tokens": 300, "stream": True, "request_id": "r" * 1000}
        sent = request("/v1/completions", json.dumps(asked).encode(), {TIMEOUT_HEADER: "1"})
        await asyncio.get_running_loop().sock_sendall(deaf, sent)
        await asyncio.wait_for(lost.wait(), WAIT_S)
    await until(cluster.is_idle)
