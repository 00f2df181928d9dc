"""The async client: `async with Client("127.0.0.1:50051") as client: await client.generate("…")`.

Knows the wire contract (pdserve.v1) and nothing else of this project. Every failure is one of
pdserve.v1.errors, whichever side it comes from.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from types import TracebackType
from typing import TypeVar

import grpc
from google.protobuf.message import Message
from typing_extensions import Self, Unpack

from pdserve.answers import cluster_of, event_of, generation_of, model_of
from pdserve.requests import GenerateOptions, Prompt, build_request, put, time_limit
from pdserve.results import (
    ChatMessage,
    Cluster,
    Completion,
    Delta,
    Event,
    Finished,
    FinishReason,
    Generation,
    Model,
    Pool,
    PositionLogprobs,
    Quantiles,
    Role,
    Started,
    Timings,
    TokenLogprob,
    Usage,
    Worker,
    WorkerState,
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

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A router whose host is gone closes no connection.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
)
_LOOPBACK = re.compile(r"(127\.[\d.]+|localhost|\[::1\]):\d+$")


class Client:
    """One channel to one router. Any number of calls may run at once."""

    def __init__(self, address: str) -> None:
        # A proxy in the environment is for the world outside, and this machine is none of it.
        proxy = (("grpc.enable_http_proxy", 0),) if _LOOPBACK.match(address) else ()
        self._channel = grpc.aio.insecure_channel(address, options=(*_CHANNEL_OPTIONS, *proxy))
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
        return generation_of(await _answer(self._generation.Generate, request, timeout, metadata))

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
            build_request(prompt, options), timeout=time_limit(timeout), metadata=_entries(metadata)
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
        return model_of(await _answer(self._generation.GetModel, request, timeout))

    async def get_cluster(self, *, timeout: float | None = None) -> Cluster:
        request = cluster_pb2.GetClusterRequest()
        return cluster_of(await _answer(self._admin.GetCluster, request, timeout))

    async def scale_pool(self, role: Role, target: int, *, timeout: float | None = None) -> Cluster:
        """Set a pool's target. The answer comes at once; later snapshots show the way there."""
        request = cluster_pb2.ScalePoolRequest(role=f"ROLE_{role.name}")
        put(request, "target", target)
        return cluster_of(await _answer(self._admin.ScalePool, request, timeout))

    async def drain_worker(
        self,
        worker_id: str,
        *,
        replace: bool = False,
        drain_timeout_s: float | None = None,
        timeout: float | None = None,
    ) -> Cluster:
        """Let a worker finish what it has and stop; `drain_timeout_s` None: as long as its work takes."""
        request = cluster_pb2.DrainWorkerRequest(worker_id=worker_id, replace=replace)
        if drain_timeout_s is not None:
            put(request, "timeout_ms", max(1, round(drain_timeout_s * 1000)))
        return cluster_of(await _answer(self._admin.DrainWorker, request, timeout))


async def _answer(
    call: Callable[..., Awaitable[T]],
    request: Message,
    timeout: float | None,
    metadata: Mapping[str, str] | None = None,
) -> T:
    try:
        return await call(request, timeout=time_limit(timeout), metadata=_entries(metadata))
    except grpc.aio.AioRpcError as error:
        raise _typed(error, timeout) from error


def _entries(metadata: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    return tuple((metadata or {}).items())


def _typed(error: grpc.aio.AioRpcError, timeout: float | None) -> PdserveError:
    """gRPC ends a call at its deadline by itself, in words of its own."""
    typed = from_rpc_error(error)
    if isinstance(typed, DeadlineExceeded) and timeout is not None:
        return DeadlineExceeded(f"not done within {timeout:g} s", reason=typed.reason)
    return typed
