"""The async client: `async with Client("127.0.0.1:50051") as client: await client.generate("…")`.

Knows the wire contract (pdserve.v1) and nothing else of this project. Every failure is one of
pdserve.v1.errors, whichever side it comes from.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import grpc
from google.protobuf.message import Message
from typing_extensions import Self, Unpack

from pdserve.answers import cluster_of, event_of, generation_of, model_of
from pdserve.channel import Credentials, open_channel
from pdserve.cluster_results import Cluster, Pool, Quantiles, Role, Router, Worker, WorkerState
from pdserve.requests import GenerateOptions, Prompt, build_request, encode, put, time_limit
from pdserve.results import (
    ChatMessage,
    Completion,
    Delta,
    Event,
    Finished,
    FinishReason,
    Generation,
    Model,
    PositionLogprobs,
    Started,
    Timings,
    TokenLogprob,
    Usage,
)
from pdserve.v1 import cluster_pb2, cluster_pb2_grpc, generation_pb2, generation_pb2_grpc
from pdserve.v1.errors import (
    Aborted,
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    PdserveError,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    Unimplemented,
    from_rpc_error,
)

__all__ = [
    "Client",
    "Credentials",
    "GenerateOptions",
    "Prompt",
    "ChatMessage",
    "Generation",
    "Completion",
    "Event",
    "Started",
    "Delta",
    "Finished",
    "FinishReason",
    "Usage",
    "Timings",
    "PositionLogprobs",
    "TokenLogprob",
    "Model",
    "Cluster",
    "Pool",
    "Router",
    "Quantiles",
    "Worker",
    "WorkerState",
    "Role",
    "PdserveError",
    "InvalidArgument",
    "NotFound",
    "Unauthenticated",
    "PermissionDenied",
    "FailedPrecondition",
    "Unimplemented",
    "ResourceExhausted",
    "Unavailable",
    "Aborted",
    "DeadlineExceeded",
    "Cancelled",
    "DataLoss",
    "Internal",
]

T = TypeVar("T")


class Client:
    """One channel to one router, or to several of one cluster. Any number of calls may run at once."""

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        tls: bool = False,
        ca: str | Path | None = None,
        cert: str | Path | None = None,
        key: str | Path | None = None,
        server_name: str | None = None,
    ) -> None:
        """`ca`, `cert`, `key` are PEM files: whose certificate the router must have, and what the client
        shows of itself where that is wanted. `tls` alone: a certificate of a CA that is known publicly.
        `server_name`: for whom the certificate must be, where that is not the host that is dialled.

        Of several addresses ("ipv4:10.0.0.1:50051,10.0.0.1:50052") calls go to each in turn. By TLS these
        want `server_name`.

        Raises OSError for a file that cannot be read, ValueError for `cert` without `key`.
        """
        credentials = Credentials(api_key, tls, _path(ca), _path(cert), _path(key), server_name)
        self._channel = open_channel(address, credentials)
        self._shown = credentials.metadata()
        self._generation = generation_pb2_grpc.GenerationStub(self._channel)
        self._admin = cluster_pb2_grpc.AdminStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close(None)

    async def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        metadata: Mapping[str, str] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """The whole answer. `prompt` is a text, token ids, or a chat's messages; `options` are those of
        `GenerateOptions`. `timeout` (seconds) is the request's time limit, the server's default if None.
        `metadata` goes along with the call: `traceparent`, as OpenTelemetry's `inject` fills it in.
        """
        request = build_request(prompt, options)
        return generation_of(await self._answer(self._generation.Generate, request, timeout, metadata))

    async def generate_stream(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        metadata: Mapping[str, str] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerator[Event, None]:
        """For each of the n sequences: one Started, any number of Deltas, one Finished.

        Closing the iterator (`aclose`, or `contextlib.aclosing` around it) cancels the request.
        """
        call = self._generation.GenerateStream(
            build_request(prompt, options), timeout=time_limit(timeout), metadata=self._entries(metadata)
        )
        try:
            async for message in call:
                yield event_of(message)
        except grpc.aio.AioRpcError as error:
            raise _typed(error, timeout) from error
        finally:
            call.cancel()

    async def get_model(self, *, timeout: float | None = None) -> Model:
        request = generation_pb2.GetModelRequest()
        return model_of(await self._answer(self._generation.GetModel, request, timeout))

    async def get_cluster(self, *, timeout: float | None = None) -> Cluster:
        request = cluster_pb2.GetClusterRequest()
        return cluster_of(await self._answer(self._admin.GetCluster, request, timeout))

    async def scale_pool(self, role: Role, target: int, *, timeout: float | None = None) -> Cluster:
        """Set a pool's target. The answer comes at once; later snapshots show the way there."""
        request = cluster_pb2.ScalePoolRequest(role=f"ROLE_{role.name}")
        put(request, "target", target)
        return cluster_of(await self._answer(self._admin.ScalePool, request, timeout))

    async def drain_worker(
        self,
        worker_id: str,
        *,
        replace: bool = False,
        replace_first: bool = False,
        drain_timeout_s: float | None = None,
        timeout: float | None = None,
    ) -> Cluster:
        """Let a worker finish what it has and stop; `drain_timeout_s` None: as long as its work takes.

        `replace`: another one starts meanwhile; `replace_first`: before, where there is room.
        """
        request = cluster_pb2.DrainWorkerRequest(
            worker_id=worker_id, replace=replace, replace_first=replace_first
        )
        if drain_timeout_s is not None:
            _put_drain_timeout(request, drain_timeout_s)
        return cluster_of(await self._answer(self._admin.DrainWorker, request, timeout))

    async def restart_router(
        self, router_id: str, *, drain_timeout_s: float, timeout: float | None = None
    ) -> Cluster:
        """Put another process in a router's place; the one before has so long for what it still does."""
        request = cluster_pb2.RestartRouterRequest(router_id=router_id)
        _put_drain_timeout(request, drain_timeout_s)
        return cluster_of(await self._answer(self._admin.RestartRouter, request, timeout))

    async def _answer(
        self,
        call: Callable[..., Awaitable[T]],
        request: Message,
        timeout: float | None,
        metadata: Mapping[str, str] | None = None,
    ) -> T:
        try:
            return await call(request, timeout=time_limit(timeout), metadata=self._entries(metadata))
        except grpc.aio.AioRpcError as error:
            raise _typed(error, timeout) from error

    def _entries(self, metadata: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
        return (*self._shown, *(metadata or {}).items())


def _put_drain_timeout(request: Message, seconds: float) -> None:
    encode("drain_timeout_s", lambda: setattr(request, "timeout_ms", max(1, round(seconds * 1000))))


def _path(named: str | Path | None) -> Path | None:
    return None if named is None else Path(named)


def _typed(error: grpc.aio.AioRpcError, timeout: float | None) -> PdserveError:
    """gRPC ends a call at its deadline by itself, in words of its own."""
    typed = from_rpc_error(error)
    is_plain = isinstance(typed, DeadlineExceeded) and typed.reason == DeadlineExceeded.default_reason
    if is_plain and timeout is not None:
        return DeadlineExceeded(f"not done within {timeout:g} s")
    return typed
