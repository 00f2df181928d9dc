"""A TCP proxy of the tests' own: one address in front of another, whose bytes can be held, slowed, damaged,
cut off or refused. What it does to a connection is what a network would do; both ends are real.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress

from typing_extensions import Self

_PIECE_BYTES = 64 * 1024
_HOST = "127.0.0.1"
# What no end of an HTTP/2 connection takes for a frame: a length over every limit, an unknown type.
NONSENSE = b"\xff" * 64
# A piece this long on a stream of KV carries a payload, and its middle is in it.
_PAYLOAD_BYTES = 4096


class Link:
    """`async with Link("127.0.0.1:5000") as link`: clients use `link.address`."""

    def __init__(self, target: str = "") -> None:
        # May be set later, and anew: a process that took another's place.
        self.target = target
        self.address = ""
        # Towards the target, since `hold` was last called.
        self.num_bytes = 0
        self.num_damaged = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._passes = asyncio.Event()
        self._passes.set()
        self._hold_after: int | None = None
        self._bytes_per_s: float | None = None
        self._delay_s = 0.0
        self._is_damaging = False

    async def __aenter__(self) -> Self:
        await self.accept()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.let_go()
        await self.refuse()
        await asyncio.gather(*self._tasks)

    # What can be done to it.

    def hold(self, after_bytes: int = 0) -> None:
        """Nothing goes to the target any more, once so many bytes more have gone."""
        self._hold_after, self.num_bytes = after_bytes, 0
        if after_bytes == 0:
            self._passes.clear()

    @property
    def is_held(self) -> bool:
        return not self._passes.is_set()

    def let_go(self) -> None:
        self._hold_after = None
        self._passes.set()

    def slow(self, bytes_per_s: float, delay_s: float) -> None:
        self._bytes_per_s, self._delay_s = bytes_per_s, delay_s

    def damage(self) -> None:
        """Of the next long piece towards the target one bit is flipped."""
        self._is_damaging = True

    def garble(self) -> None:
        """Nonsense among the bytes of every connection there is, towards its client."""
        for writer in tuple(self._writers):
            with suppress(OSError, RuntimeError):
                writer.write(NONSENSE)

    def cut(self) -> None:
        """Every connection there is ends as by a reset; new ones are taken."""
        for writer in tuple(self._writers):
            _reset(writer)

    async def refuse(self) -> None:
        """And until `accept` new ones find nobody."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.cut()

    async def accept(self) -> None:
        if self._server is None:
            port = int(self.address.rpartition(":")[2] or 0)
            self._server = await asyncio.start_server(self._serve, _HOST, port, reuse_address=True)
            self.address = f"{_HOST}:{self._server.sockets[0].getsockname()[1]}"

    async def mend(self) -> None:
        """As at the beginning."""
        self.let_go()
        self._bytes_per_s, self._delay_s, self._is_damaging = None, 0.0, False
        await self.accept()

    # How bytes pass.

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._writers.add(writer)
        try:
            host, _, port = self.target.rpartition(":")
            there_reader, there_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            _reset(writer)
            return
        finally:
            self._writers.discard(writer)
        await self._join((reader, writer), (there_reader, there_writer))

    async def _join(
        self,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        there: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        """Until either end is gone, and then both."""
        self._writers.add(client[1])
        pumps = (
            asyncio.ensure_future(self._pump(client[0], there[1], is_upward=True)),
            asyncio.ensure_future(self._pump(there[0], client[1], is_upward=False)),
        )
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._writers.discard(client[1])
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for _, writer in (client, there):
                _reset(writer)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_upward: bool
    ) -> None:
        with suppress(OSError):
            while piece := await reader.read(_PIECE_BYTES):
                await self._take_time(len(piece))
                if is_upward:
                    await self._pass_up(piece, writer)
                else:
                    writer.write(piece)
                await writer.drain()

    async def _take_time(self, num_bytes: int) -> None:
        if self._bytes_per_s is not None:
            await asyncio.sleep(self._delay_s + num_bytes / self._bytes_per_s)

    async def _pass_up(self, piece: bytes, writer: asyncio.StreamWriter) -> None:
        if self._is_damaging and len(piece) >= _PAYLOAD_BYTES:
            self._is_damaging = False
            self.num_damaged += 1
            middle = len(piece) // 2
            piece = piece[:middle] + bytes([piece[middle] ^ 1]) + piece[middle + 1 :]
        if self._hold_after is not None and self.num_bytes + len(piece) > self._hold_after:
            room = max(0, self._hold_after - self.num_bytes)
            writer.write(piece[:room])
            self.num_bytes += room
            piece = piece[room:]
            self._passes.clear()
        await self._passes.wait()
        self.num_bytes += len(piece)
        writer.write(piece)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Closed at once, with an RST: what was not delivered yet is lost."""
    connection = writer.get_extra_info("socket")
    if connection is not None and connection.fileno() >= 0:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
