"""Several servers as one: each in turn, as a proxy in front of them would, and without what a proxy costs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from pdserve.bench.serve.client import Answer, ServeClient, Served
from pdserve.bench.serve.workload import PlannedRequest


class RoundRobin:
    def __init__(self, clients: Sequence[ServeClient]) -> None:
        self._clients = clients
        self._turns = itertools.cycle(clients)

    async def served(self) -> Served:
        """The first one's; all are asked."""
        first, *_ = [await client.served() for client in self._clients]
        return first

    async def send(self, request: PlannedRequest, on_tokens: Callable[[], None]) -> Answer:
        return await next(self._turns).send(request, on_tokens)
