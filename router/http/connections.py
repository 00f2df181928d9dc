"""A request lives as long as its connection: who hangs up cancels; a router that stops ends what is left."""

from __future__ import annotations

import asyncio
from types import TracebackType

from starlette.requests import Request
from typing_extensions import Self

from pdserve.v1.errors import Cancelled, PdserveError
from router.front.calls import stopping
from router.http.protocol import ABORT
from router.interruption import Interruption


class Connection:
    """`async with Connection(request)`, once the body was read: cancels what the task waits for when the
    client is gone (raises Cancelled) or the server ends (raises Unavailable). A watcher waits for nothing in
    particular: it is ended as soon as the server begins to leave."""

    def __init__(self, request: Request, *, is_watcher: bool = False) -> None:
        self.is_watcher = is_watcher
        self._request = request
        self._open = connections_of(request)
        self._work = Interruption()
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._work.__enter__()
        self._watch = asyncio.create_task(self._until_gone())
        self._open.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.discard(self)
        if self._watch is not None:
            self._watch.cancel()
        self._work.__exit__(kind, error, traceback)

    def end(self, error: PdserveError) -> None:
        self._work.end(error)

    async def _until_gone(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self.end(Cancelled("the client closed the connection"))


class Connections:
    """Those with a request in flight."""

    def __init__(self) -> None:
        self._open: set[Connection] = set()

    def add(self, connection: Connection) -> None:
        self._open.add(connection)

    def discard(self, connection: Connection) -> None:
        self._open.discard(connection)

    def end(self) -> None:
        for connection in tuple(self._open):
            connection.end(stopping())

    def end_watchers(self) -> None:
        for connection in tuple(self._open):
            if connection.is_watcher:
                connection.end(stopping())


def connections_of(request: Request) -> Connections:
    found: object = request.app.state.connections
    if not isinstance(found, Connections):
        raise TypeError("the app was made without its connections")
    return found


async def hang_up(request: Request) -> None:
    """At once: what the client did not take is dropped."""
    abort: object = getattr(request.state, ABORT, None)
    if callable(abort):
        abort()
        # It is lost in the loop's next turn.
        await asyncio.sleep(0)
