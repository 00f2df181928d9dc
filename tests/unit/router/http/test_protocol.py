"""One connection by hand: what clients do that an SDK would not, and an app that says what it was sent."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import uvicorn
from uvicorn._types import ASGIReceiveCallable, ASGISendCallable, Scope

from router.http import protocol
from router.http.protocol import BoundedProtocol
from router.http.server import _bind, _Server

WAIT_S = 20.0
# More than the sockets' own buffers hold.
LARGE = 12 << 20
OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
SIZED = b"content-length: 5\r\n\r\n", b"hello"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n", b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"


async def echo(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
    """The body, behind the path."""
    assert scope["type"] == "http"
    body = b""
    while True:
        message = await receive()
        assert message["type"] == "http.request"
        body += message["body"]
        if not message["more_body"]:
            break
    said = bytes(LARGE) if scope["path"] == "/large" else scope["path"].encode() + b" " + body
    length = (b"content-length", str(len(said)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [length], "trailers": False})
    await send({"type": "http.response.body", "body": said, "more_body": False})


@pytest_asyncio.fixture
async def port() -> AsyncIterator[int]:
    listening = _bind("127.0.0.1:0")
    config = uvicorn.Config(
        echo, http=BoundedProtocol, ws="none", lifespan="off", log_config=None, access_log=False
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve([listening]))
    yield int(listening.getsockname()[1])
    server.should_exit = server.force_exit = True
    await asyncio.wait_for(serving, WAIT_S)


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)).decode().lower()
    length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
    return int(head.split()[1]), await asyncio.wait_for(reader.readexactly(length), WAIT_S)


@pytest.mark.parametrize("framed", [SIZED, CHUNKED], ids=["sized", "chunked"])
@pytest.mark.parametrize("is_split", [False, True], ids=["at once", "in parts"])
async def test_a_request_that_offers_another_protocol_is_served_in_this_one(
    port: int, framed: tuple[bytes, bytes], is_split: bool
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    fields, body = framed
    for path in (b"/first", b"/second"):
        head = b"POST " + path + b" HTTP/1.1\r\nhost: x\r\n" + OFFER + fields
        for part in (head[:50], head[50:], body[:3], body[3:]) if is_split else (head + body,):
            writer.write(part)
            await asyncio.sleep(0.02 * is_split)
        assert await answer(reader) == (200, path + b" hello")
    # Behind an offer others may wait already.
    plain = b"GET /third HTTP/1.1\r\nhost: x\r\n\r\n"
    writer.write(head + body + plain)
    assert await answer(reader) == (200, b"/second hello")
    assert await answer(reader) == (200, b"/third ")
    writer.close()


async def test_an_offer_without_a_body_is_served_too_and_a_tunnel_is_refused(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /a HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
    assert await answer(reader) == (200, b"/a ")
    writer.write(b"CONNECT x:443 HTTP/1.1\r\nhost: x:443\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\nabc")
    assert (await answer(reader))[0] == 400
    writer.close()


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
async def test_a_large_answer_may_go_over_a_slow_line(
    port: int, connection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "_LINGER_S", 0.2)
    monkeypatch.setattr(protocol, "_STALL_S", 0.2)
    monkeypatch.setattr(protocol, "_SLOWEST_BYTES_S", 1 << 19)
    loop = asyncio.get_running_loop()
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        slow.setblocking(False)
        await loop.sock_connect(slow, ("127.0.0.1", port))
        head = f"GET /large HTTP/1.1\r\nhost: x\r\nconnection: {connection}\r\n\r\n"
        await loop.sock_sendall(slow, head.encode())
        num_taken = 0
        while num_taken < LARGE:
            taken = await asyncio.wait_for(loop.sock_recv(slow, 1 << 18), WAIT_S)
            assert taken, f"cut after {num_taken} bytes"
            num_taken += len(taken)
            await asyncio.sleep(0.005)


async def test_who_takes_nothing_of_an_answer_is_cut(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_STALL_S", 0.1)
    monkeypatch.setattr(protocol, "_SLOWEST_BYTES_S", 1 << 30)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 12)
    writer.write(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n")
    await asyncio.sleep(0.5)
    num_taken = 0
    try:
        while taken := await asyncio.wait_for(reader.read(1 << 16), WAIT_S):
            num_taken += len(taken)
    except ConnectionError:
        pass
    assert num_taken < LARGE
    writer.close()
