"""The proxy does to a connection what the faults' matrix counts on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.faults.link import NONSENSE, Link

WAIT_S = 10.0


@pytest.fixture
async def link() -> AsyncIterator[Link]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(65536):
            writer.write(piece)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with Link(f"{host}:{port}") as made:
        yield made
    server.close()


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, link: Link) -> Connection:
        host, _, port = link.address.rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    async def get(self, num_bytes: int) -> bytes:
        return await asyncio.wait_for(self.reader.readexactly(num_bytes), WAIT_S)

    async def echo(self, sent: bytes) -> bytes:
        self.writer.write(sent)
        return await self.get(len(sent))

    async def is_reset(self) -> bool:
        try:
            return await asyncio.wait_for(self.reader.read(1), WAIT_S) == b""
        except ConnectionResetError:
            return True


async def test_what_is_held_waits_and_then_passes_whole(link: Link) -> None:
    connection = await Connection.to(link)
    assert await connection.echo(b"before") == b"before"
    link.hold(after_bytes=3)
    connection.writer.write(b"abcdef")
    assert await connection.get(3) == b"abc"
    assert link.is_held
    link.let_go()
    assert await connection.get(3) == b"def"


async def test_a_cut_ends_connections_and_takes_new_ones(link: Link) -> None:
    connection = await Connection.to(link)
    await connection.echo(b"x")
    link.cut()
    assert await connection.is_reset()
    assert await (await Connection.to(link)).echo(b"y") == b"y"


async def test_refusing_ends_connections_and_refuses_new_ones_until_it_accepts_at_the_same_address(
    link: Link,
) -> None:
    connection = await Connection.to(link)
    await connection.echo(b"x")
    await link.refuse()
    assert await connection.is_reset()
    with pytest.raises(ConnectionRefusedError):
        await Connection.to(link)
    await link.accept()
    assert await (await Connection.to(link)).echo(b"y") == b"y"


async def test_one_bit_of_one_long_piece_is_damaged(link: Link) -> None:
    connection = await Connection.to(link)
    link.damage()
    assert await connection.echo(b"short") == b"short"
    long = bytes(8192)
    came = await connection.echo(long)
    assert sum(byte.bit_count() for byte in came) == 1
    assert link.num_damaged == 1
    assert await connection.echo(long) == long


async def test_nonsense_comes_among_what_is_sent(link: Link) -> None:
    connection = await Connection.to(link)
    await connection.echo(b"x")
    link.garble()
    assert await connection.get(len(NONSENSE)) == NONSENSE


async def test_a_slow_link_takes_its_time_and_is_whole(link: Link) -> None:
    connection = await Connection.to(link)
    link.slow(20_000, 0.0)
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await connection.echo(bytes(4000)) == bytes(4000)
    assert loop.time() - began >= 0.4  # both ways


async def test_nobody_behind_the_link_resets_the_client() -> None:
    async with Link("127.0.0.1:1") as link:
        assert await (await Connection.to(link)).is_reset()
