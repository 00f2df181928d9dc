"""Servers that answer the cluster's own parts only: whatever is called there, by whatever handler, health and
unknown names included, is refused before a byte of its message is looked at, unless the secret was shown.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn, Protocol, TypeAlias, cast

import grpc

from pdserve.v1.errors import Unauthenticated, to_status
from trust.channels import Options
from trust.secret import Metadata
from trust.trust import Trust

Handler: TypeAlias = "grpc.RpcMethodHandler[object, object]"
# One line about refused calls in so many seconds, however many there are.
_TELL_EVERY_S = 10.0
log = logging.getLogger(__name__)


def make_server(
    threads: ThreadPoolExecutor, trust: Trust, options: Options, maximum_concurrent_rpcs: int
) -> grpc.Server:
    return grpc.server(
        threads,
        interceptors=[_Guard(trust)],
        options=options,
        maximum_concurrent_rpcs=maximum_concurrent_rpcs,
    )


def make_aio_server(trust: Trust, options: Options = ()) -> grpc.aio.Server:
    return grpc.aio.server(interceptors=[_AioGuard(trust)], options=options)


class _Listening(Protocol):
    def add_insecure_port(self, address: str) -> int: ...

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int: ...


def listen(server: _Listening, address: str, trust: Trust) -> int:
    """The port. Raises RuntimeError, which names the address, where it is taken, and TrustError."""
    if trust.tls is None:
        return server.add_insecure_port(address)
    ca, cert, key = trust.tls.read()
    return server.add_secure_port(address, grpc.ssl_server_credentials([(key, cert)], ca, True))


class _Guard(grpc.ServerInterceptor):  # type: ignore[type-arg]
    def __init__(self, trust: Trust) -> None:
        self._secret = trust.secret
        refusals = _Refusals()

        def refuse(messages: Iterator[object], context: grpc.ServicerContext) -> Iterator[object]:
            refusals.note(context.peer())
            context.abort_with_status(to_status(_error()))

        self._refuse = _reading_nothing(refuse)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        is_shown = self._secret.is_shown_in(_metadata(handler_call_details))
        return continuation(handler_call_details) if is_shown else self._refuse


class _AioGuard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    def __init__(self, trust: Trust) -> None:
        self._secret = trust.secret
        refusals = _Refusals()

        async def refuse(messages: AsyncIterator[object], context: _AioContext) -> None:
            refusals.note(context.peer())
            await context.abort_with_status(to_status(_error()))

        self._refuse = _reading_nothing(refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        is_shown = self._secret.is_shown_in(_metadata(handler_call_details))
        return await continuation(handler_call_details) if is_shown else self._refuse


class _AioContext(Protocol):
    """What grpc-stubs leave out of grpc.aio.ServicerContext."""

    def peer(self) -> str: ...

    async def abort_with_status(self, status: grpc.Status) -> NoReturn: ...


def _reading_nothing(refuse: Callable[..., object]) -> Handler:
    """A handler of streams waits for no message, as one of single messages would. The wire is the same."""
    return cast(Handler, grpc.stream_stream_rpc_method_handler(refuse))


def _metadata(details: grpc.HandlerCallDetails) -> Metadata:
    return cast(Sequence[tuple[str, str | bytes]], details.invocation_metadata or ())


def _error() -> Unauthenticated:
    return Unauthenticated("only parts of this cluster are served here", reason="NO_CLUSTER_SECRET")


class _Refusals:
    """Tells of them, so that a wrong secret is found; seldom, so that nobody can fill a disk."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_untold = 0
        self._told_at = -_TELL_EVERY_S

    def note(self, peer: str) -> None:
        with self._lock:
            self._num_untold += 1
            now = time.monotonic()
            if now - self._told_at < _TELL_EVERY_S:
                return
            num_refused, self._num_untold, self._told_at = self._num_untold, 0, now
        log.warning("refused without the cluster's secret: %d calls, the last from=%s", num_refused, peer)
