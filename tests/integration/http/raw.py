"""HTTP by hand: what an SDK would not send, and connections that a test closes when it likes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass

_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> dict:  # type: ignore[type-arg]
        """Of a shape that the test knows."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, object]:
        return self.json["error"]


async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    return await asyncio.wait_for(asyncio.open_connection(host, int(port)), _TIMEOUT_S)


def request(path: str, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
    fields = {"host": "localhost", "content-type": "application/json", "content-length": str(len(body))}
    lines = "".join(f"{name}: {value}\r\n" for name, value in (fields | dict(headers or {})).items())
    return f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + body


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    """One that has a content-length."""
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _TIMEOUT_S)).decode()
    first, *lines = head.strip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await asyncio.wait_for(reader.readexactly(int(headers["content-length"])), _TIMEOUT_S)
    return Answer(int(first.split()[1]), headers, body)


async def send(
    address: str, path: str, body: bytes, headers: Mapping[str, str] | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The answer is the test's to read."""
    reader, writer = await connect(address)
    writer.write(request(path, body, headers))
    return reader, writer


async def post(address: str, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> Answer:
    reader, writer = await send(address, path, body, headers)
    try:
        return await read_answer(reader)
    finally:
        writer.close()


async def get(address: str, path: str, headers: Mapping[str, str] | None = None) -> Answer:
    reader, writer = await connect(address)
    lines = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n{lines}\r\n".encode())
    try:
        return await read_answer(reader)
    finally:
        writer.close()
