"""A client reaches the routers of its own machine whatever proxy the environment has."""

from __future__ import annotations

import asyncio
import socket

import grpc
import psutil
import pytest

from pdserve.channel import Credentials, open_channel

OWN = [
    each.address
    for addresses in psutil.net_if_addrs().values()
    for each in addresses
    if each.family is socket.AF_INET
]


@pytest.mark.parametrize("host", ["0.0.0.0", "localhost", *OWN])
async def test_no_proxy_stands_before_a_router_of_this_machine(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody is there
    server = grpc.aio.server()
    port = server.add_insecure_port(f"{host}:0")
    await server.start()
    try:
        async with open_channel(f"{host}:{port}", Credentials()) as channel:
            await asyncio.wait_for(channel.channel_ready(), 20)
    finally:
        await server.stop(0)
