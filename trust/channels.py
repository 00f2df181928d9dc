"""Channels to other parts of the cluster: every call on them shows the secret.

The asyncio one adds it where a call is made: gRPC's own interceptors there put a generator around every
message of a stream, and tokens come by one long stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Generic, NamedTuple, TypeVar, cast

import grpc

from trust.trust import Trust

Options = Sequence[tuple[str, str | int]]
Call = TypeVar("Call")
Shown = tuple[tuple[str, str | bytes], ...]
# A proxy in the environment is for the world outside.
_NO_PROXY = ("grpc.enable_http_proxy", 0)


def open_channel(address: str, trust: Trust, options: Options = ()) -> grpc.Channel:
    """Raises TrustError."""
    options = _all_options(trust, options)
    credentials = _credentials(trust)
    if credentials is None:
        channel = grpc.insecure_channel(address, options=options)
    else:
        channel = grpc.secure_channel(address, credentials, options=options)
    return grpc.intercept_channel(channel, _Showing(trust.secret.shown))


def open_aio_channel(address: str, trust: Trust, options: Options = ()) -> grpc.aio.Channel:
    """Raises TrustError."""
    options = _all_options(trust, options)
    credentials = _credentials(trust)
    if credentials is None:
        channel = grpc.aio.insecure_channel(address, options=options)
    else:
        channel = grpc.aio.secure_channel(address, credentials, options=options)
    return _ShowingChannel(channel, trust.secret.shown)


def _all_options(trust: Trust, options: Options) -> list[tuple[str, str | int]]:
    names = [] if trust.tls is None else [("grpc.ssl_target_name_override", trust.tls.name)]
    return [_NO_PROXY, *names, *options]


def _credentials(trust: Trust) -> grpc.ChannelCredentials | None:
    if trust.tls is None:
        return None
    ca, cert, key = trust.tls.read()
    return grpc.ssl_channel_credentials(ca, key, cert)


class _Details(NamedTuple):
    """grpc.ClientCallDetails, which is abstract."""

    method: str
    timeout: float | None
    metadata: Shown
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: grpc.Compression | None


class _Showing(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[type-arg]
    grpc.UnaryStreamClientInterceptor,  # type: ignore[type-arg]
    grpc.StreamStreamClientInterceptor,  # type: ignore[type-arg]
):
    """For calls of threads: a few long streams."""

    def __init__(self, shown: tuple[str, str]) -> None:
        self._shown = shown

    def intercept_unary_unary(
        self,
        continuation: Callable[[grpc.ClientCallDetails, object], grpc.CallFuture[object]],
        client_call_details: grpc.ClientCallDetails,
        request: object,
    ) -> grpc.CallFuture[object]:
        return continuation(self._with_secret(client_call_details), request)

    def intercept_unary_stream(
        self,
        continuation: Callable[[grpc.ClientCallDetails, object], grpc.CallIterator[object]],
        client_call_details: grpc.ClientCallDetails,
        request: object,
    ) -> grpc.CallIterator[object]:
        return continuation(self._with_secret(client_call_details), request)

    def intercept_stream_stream(
        self,
        continuation: Callable[[grpc.ClientCallDetails, Iterator[object]], grpc.CallIterator[object]],
        client_call_details: grpc.ClientCallDetails,
        request_iterator: Iterator[object],
    ) -> grpc.CallIterator[object]:
        return continuation(self._with_secret(client_call_details), request_iterator)

    def _with_secret(self, details: grpc.ClientCallDetails) -> grpc.ClientCallDetails:
        made = _Details(
            details.method,
            details.timeout,
            (*(details.metadata or ()), self._shown),
            details.credentials,
            details.wait_for_ready,
            details.compression,
        )
        return cast(grpc.ClientCallDetails, made)


class _Method(Generic[Call]):
    """A method of a stub, with the secret in each of its calls."""

    def __init__(self, method: Callable[..., Call], shown: tuple[str, str]) -> None:
        self._method = method
        self._shown = shown

    def __call__(self, *request: object, metadata: Shown | None = None, **options: object) -> Call:
        return self._method(*request, metadata=(*(metadata or ()), self._shown), **options)


class _ShowingChannel(grpc.aio.Channel):
    """What stubs are made of; whatever else they hand over is the inner channel's."""

    def __init__(self, channel: grpc.aio.Channel, shown: tuple[str, str]) -> None:
        self._channel = channel
        self._shown = shown

    def unary_unary(self, *method: object, **options: object) -> object:  # type: ignore[override]
        return self._showing(self._channel.unary_unary, method, options)

    def unary_stream(self, *method: object, **options: object) -> object:  # type: ignore[override]
        return self._showing(self._channel.unary_stream, method, options)

    def stream_unary(self, *method: object, **options: object) -> object:  # type: ignore[override]
        return self._showing(self._channel.stream_unary, method, options)

    def stream_stream(self, *method: object, **options: object) -> object:  # type: ignore[override]
        return self._showing(self._channel.stream_stream, method, options)

    def _showing(
        self, make: Callable[..., Callable[..., Call]], method: tuple[object, ...], options: dict[str, object]
    ) -> _Method[Call]:
        return _Method(make(*method, **options), self._shown)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    async def __aenter__(self) -> grpc.aio.Channel:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        await self._channel.close(None)
