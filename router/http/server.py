"""The HTTP server on the router's own event loop: one address, from `start` to `close`."""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from router.access.gate import Gate
from router.access.tls import ssl_context
from router.bind import CannotBind
from router.http.app import make_app
from router.http.connections import Connections
from router.http.protocol import BoundedProtocol
from router.router import Router

# Longer than clients keep a connection that they do not use: it is theirs to close.
_KEEP_ALIVE_S = 75
_BACKLOG = 2048
# For answers that were ended to be written out.
LAST_WORDS_S = 1.0


class HttpServer:
    """Takes the address when it is made. Raises CannotBind."""

    def __init__(self, router: Router, gate: Gate, address: str) -> None:
        self._router = router
        self._socket = _bind(address)
        host = address.rpartition(":")[0]
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self._connections = Connections()
        config = uvicorn.Config(
            make_app(router, gate, self._connections, host),
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=math.ceil(LAST_WORDS_S),
            ssl_context_factory=_tls(router),
        )
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._serving = self._router.tasks.start(self._server.serve([self._socket]), "http")

    async def drain(self, grace_s: float) -> None:
        """New connections are refused; requests in flight may take so long."""
        self._server.config.timeout_graceful_shutdown = math.ceil(grace_s + LAST_WORDS_S)
        self._server.should_exit = True
        self._connections.end_watchers()
        if self._serving is not None:
            await asyncio.wait({self._serving}, timeout=grace_s)
        await self.close()

    async def close(self) -> None:
        self._server.should_exit = True
        self._connections.end()
        if self._serving is None:
            self._socket.close()
        elif not self._serving.done():
            await asyncio.wait({self._serving}, timeout=LAST_WORDS_S)
            self._server.force_exit = True


def _tls(router: Router) -> Callable[[uvicorn.Config, Callable[[], ssl.SSLContext]], ssl.SSLContext] | None:
    files = router.config.tls
    if files is None:
        return None
    context = ssl_context(files)
    return lambda _, default: context


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's."""
        yield


def _bind(address: str) -> socket.socket:
    """Listening already: whoever was told the address may connect."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # By its protocol asyncio knows it for TCP, and lets small writes go at once (TCP_NODELAY).
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((host, int(port)))
        bound.listen(_BACKLOG)
    except (OSError, ValueError, OverflowError) as error:
        bound.close()
        raise CannotBind(f"cannot serve HTTP at {address}: {error}") from error
    bound.setblocking(False)
    return bound
