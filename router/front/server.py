"""The router's servers: gRPC with its services, health and reflection, and HTTP where it is configured."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection
from typing_extensions import Self

from router.access.gate import Gate
from router.access.tls import grpc_credentials
from router.bind import CannotBind, refuse_taken, stop_listening, unix_target
from router.front.guard import Guard
from router.front.health import health_handlers
from router.front.service import AdminService, GenerationService
from router.http.server import LAST_WORDS_S, HttpServer
from router.router import Router

# Beyond what is taken, so that a request that is too large is refused by name and not by gRPC.
_MIN_MESSAGE_LIMIT_BYTES = 16 << 20
_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),
    ("grpc.keepalive_permit_without_calls", 1),
    # A busy event loop takes calls up late. By default gRPC ends those that wait for it by a bare CANCELLED:
    # after 30 s, some at once where over 1000 wait. Here they wait, for their own deadlines or our status.
    ("grpc.server_max_unrequested_time_in_server", 3600),
    ("grpc.server.max_pending_requests", 1 << 13),
    ("grpc.server.max_pending_requests_hard_limit", 1 << 14),
)
# For a connection's first call to come after it.
_JUST_COME_S = 1.0
_HEALTH_NAMES = ("", GenerationService.NAME)


class RouterServer:
    """`async with RouterServer(router)`: serves from entering to leaving; `drain` first to leave gently.

    `is_beside`: its addresses are another router's still, whose place it takes.
    """

    def __init__(self, router: Router, is_beside: bool = False) -> None:
        self.router = router
        self._is_beside = is_beside
        self.address = ""
        self._http: HttpServer | None = None
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._changed = asyncio.Event()
        self._generation = GenerationService(router)
        self._admin = AdminService(router)
        limit = max(_MIN_MESSAGE_LIMIT_BYTES, 2 * self._generation.max_request_bytes)
        self._options = (
            *_OPTIONS,
            ("grpc.max_receive_message_length", limit),
            ("grpc.max_concurrent_streams", router.config.max_streams_per_connection),
        )
        self._gate = Gate(router.config.api_keys)
        # An interceptor costs each call something.
        self._server = self._made(() if router.config.api_keys is None else (Guard(self._gate),))
        # Where a key or a certificate has to be shown, this one wants neither.
        self._local: grpc.aio.Server | None = None

    async def __aenter__(self) -> Self:
        config = self.router.config
        try:
            for address in config.addresses().values() if not self._is_beside else ():
                refuse_taken(address)
            self.address = self._bind(config.grpc)
            if config.local_socket is not None:
                self._local = self._made(())
                _bind_locally(self._local, config.local_socket)
            if config.http is not None:
                self._http = HttpServer(self.router, self._gate, config.http)
        except CannotBind:
            await self.router.close()
            raise
        self.router.table.on_change(self._changed.set)
        self.router.start()
        self.router.tasks.start(self._keep_health(), "health")
        for server in self._servers():
            await server.start()
        if self._http is not None:
            self._http.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._http is not None:
            await self._http.close()
        for server in self._servers():
            await server.stop(None)
        await self.router.close()

    def _servers(self) -> list[grpc.aio.Server]:
        return [self._server] if self._local is None else [self._server, self._local]

    def _made(self, interceptors: Sequence[Guard]) -> grpc.aio.Server:
        server = grpc.aio.server(options=self._options, interceptors=interceptors)
        generation, admin = self._generation, self._admin
        services = {service.NAME: service.handlers() for service in (generation, admin)}
        services[health.SERVICE_NAME] = health_handlers(self._health)
        for name, handlers in services.items():
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
        names = (generation.NAME, admin.NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        return server

    @property
    def http_address(self) -> str | None:
        """None: not served."""
        return self._http.address if self._http is not None else None

    async def step_aside(self) -> None:
        """New connections go to the successor that listens beside; who has just come is heard here still.

        A gRPC server that is told to stop cancels calls that it has not begun: then there shall be none.
        """
        stop_listening(self.address)
        await asyncio.sleep(_JUST_COME_S)

    async def drain(self, grace_s: float) -> None:
        """New calls are refused; those in flight may take so long."""
        await self._health.enter_graceful_shutdown()
        stopping = [server.stop(grace_s + LAST_WORDS_S) for server in self._servers()]
        if self._http is not None:
            stopping.append(self._http.drain(grace_s))
        ending = asyncio.get_running_loop().call_later(grace_s, self._generation.calls.end)
        try:
            await asyncio.gather(*stopping)
        finally:
            ending.cancel()

    def _bind(self, address: str) -> str:
        tls = self.router.config.tls
        try:
            if tls is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, grpc_credentials(tls))
        except (RuntimeError, ValueError) as error:
            raise CannotBind(f"cannot serve gRPC at {address}: {error}") from error
        return f"{address.rpartition(':')[0]}:{port}"

    async def _keep_health(self) -> None:
        """SERVING while a request that came now could be served."""
        while True:
            self._changed.clear()
            is_serving = self.router.table.is_serving
            states = health_pb2.HealthCheckResponse
            for name in _HEALTH_NAMES:
                await self._health.set(name, states.SERVING if is_serving else states.NOT_SERVING)
            await self._changed.wait()


def _bind_locally(server: grpc.aio.Server, path: Path) -> None:
    """gRPC removes what it has bound when it ends, and by then the path may be a successor's."""
    own = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        server.add_insecure_port(unix_target(own))
        own.chmod(0o600)
        own.replace(path)
    except (RuntimeError, OSError) as error:
        raise CannotBind(f"cannot serve gRPC at {path}: {error}") from error
