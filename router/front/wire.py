"""gRPC method handlers of the router's fronts: parse failures and errors become statuses here, and only here.

A message that cannot be parsed (invalid UTF-8, a cut length) is the client's mistake: gRPC would call it
INTERNAL, so the deserializer hands the failure on as a value. Nor is one parsed that is too large to be
right: millions of empty parts would take a hundred times their size, and the event loop for seconds.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError, Message

from pdserve.v1.errors import Internal, InvalidArgument, PdserveError, to_status

M = TypeVar("M", bound=Message)
R = TypeVar("R", bound=Message)
if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[M, R]
    # Of whatever messages: a service is a table of them.
    Handler = grpc.RpcMethodHandler[Message, Message]
    Handlers = dict[str, Handler]

logger = logging.getLogger(__name__)

# For messages that hold no prompt.
SMALL_MESSAGE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Malformed:
    complaint: str


def unary(
    kind: type[M],
    answer: Callable[[M, Context[M, R]], Awaitable[R]],
    max_bytes: int = SMALL_MESSAGE_BYTES,
) -> Handler:
    async def handle(message: M | Malformed, context: Context[M, R]) -> R:
        async with answering(context):
            return await answer(_well_formed(message), context)

    method: grpc.RpcMethodHandler[M, R] = grpc.unary_unary_rpc_method_handler(
        handle, request_deserializer=_parser(kind, max_bytes), response_serializer=_serialize
    )
    return cast("Handler", method)


def server_stream(
    kind: type[M], answer: Callable[[M, Context[M, R]], Awaitable[None]], max_bytes: int
) -> Handler:
    """`answer` writes to the context."""

    async def handle(message: M | Malformed, context: Context[M, R]) -> None:
        async with answering(context):
            await answer(_well_formed(message), context)

    method: grpc.RpcMethodHandler[M, R] = grpc.unary_stream_rpc_method_handler(
        handle, request_deserializer=_parser(kind, max_bytes), response_serializer=_serialize
    )
    return cast("Handler", method)


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _parser(kind: type[M], max_bytes: int) -> Callable[[bytes], M | Malformed]:
    def parse(raw: bytes) -> M | Malformed:
        if len(raw) > max_bytes:
            return Malformed(f"a {kind.DESCRIPTOR.name} of {len(raw)} bytes: at most {max_bytes} are taken")
        try:
            return kind.FromString(raw)
        except DecodeError as error:
            return Malformed(f"not a {kind.DESCRIPTOR.name}: {error}")

    return parse


def _well_formed(message: M | Malformed) -> M:
    if isinstance(message, Malformed):
        raise InvalidArgument(message.complaint, reason="MALFORMED")
    return message


@asynccontextmanager
async def answering(context: Context[M, R]) -> AsyncIterator[None]:
    """What is raised inside becomes this call's status; a cancel passes through."""
    try:
        yield
    except PdserveError as error:
        await _abort(context, error)
    except grpc.aio.AbortError:
        raise
    except grpc.aio.InternalError as failure:  # a message could not be sent: the client is gone
        raise asyncio.CancelledError from failure
    except Exception:  # the client gets an id under which the log has the stack
        error_id = uuid.uuid4().hex
        logger.exception("bug error_id=%s", error_id)
        await _abort(context, Internal(f"internal error {error_id}"))


async def _abort(context: Context[M, R], error: PdserveError) -> None:
    status = to_status(error)
    try:
        await context.abort(status.code, status.details, status.trailing_metadata)
    except grpc.aio.InternalError as failure:
        # A message is still on its way to a client that takes none, and no status can pass it.
        raise asyncio.CancelledError from failure
