"""Clients that ask one request after the other, each over a connection of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

from benchmarks.under_faults.answers import Answer, answered
from benchmarks.under_faults.asks import Ask
from pdserve.client import Client

# Called before each request: it may make a client wait.
Gate = Callable[[int], Awaitable[None]]


async def no_gate(num_done: int) -> None:
    """Everybody goes on at once."""


class Load:
    """`answers` grows as requests end."""

    def __init__(self, address: str, num_clients: int, timeout_s: float, done: Callable[[], None]) -> None:
        self.answers: list[Answer] = []
        self._address = address
        self._num_clients = num_clients
        self._timeout_s = timeout_s
        self._done = done

    async def ask_all(self, asks: Sequence[Ask], gate: Gate = no_gate) -> None:
        """Client i asks number i, i + clients, …"""
        async with AsyncExitStack() as stack:
            asking = []
            for first in range(self._num_clients):
                client = await stack.enter_async_context(Client(self._address))
                asking.append(self._ask(client, asks[first :: self._num_clients], gate))
            await asyncio.gather(*asking)

    async def _ask(self, client: Client, asks: Sequence[Ask], gate: Gate) -> None:
        for ask in asks:
            await gate(len(self.answers))
            self.note(await answered(client, ask, self._timeout_s))

    def note(self, answer: Answer) -> None:
        self.answers.append(answer)
        self._done()
