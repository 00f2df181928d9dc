"""Errors of a worker's RPCs become statuses here, and nowhere else."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn, Protocol, TypeVar, cast

import grpc

from engine.errors import CannotFit, EngineError, GrammarError, NoRoom
from engine.request import SequenceOutput
from pdserve.v1.errors import (
    Internal,
    InvalidArgument,
    PdserveError,
    ResourceExhausted,
    Unavailable,
    to_status,
)

T_contra = TypeVar("T_contra", contravariant=True)
log = logging.getLogger(__name__)
# When a router that was refused for want of room may ask again.
RETRY_AFTER_S = 0.05


class _Abortable(Protocol):
    """What grpc-stubs leave out of grpc.aio.ServicerContext."""

    async def abort_with_status(self, status: grpc.Status) -> NoReturn: ...


def typed(error: EngineError) -> PdserveError:
    """What the engine's refusal is on the wire."""
    if isinstance(error, CannotFit):
        return InvalidArgument(str(error), reason="CANNOT_FIT")
    if isinstance(error, GrammarError):
        return InvalidArgument(f"sampling.structured: {error}", reason="GRAMMAR")
    if isinstance(error, NoRoom):
        return ResourceExhausted(str(error), reason="NO_ROOM", retry_after_s=RETRY_AFTER_S)
    return Unavailable(f"the engine takes no calls: {error}", reason="ENGINE_STOPPED")


def failure(output: SequenceOutput) -> PdserveError:
    """What an output with an error is on the wire."""
    if output.is_refused:
        return InvalidArgument(f"sampling.structured: {output.error}", reason="GRAMMAR")
    return Internal(f"{output.sequence_id}: {output.error}", reason="ENGINE_FAILED")


class Writer(Protocol[T_contra]):
    """The context of a streaming RPC. Its handlers write by themselves instead of yielding: then a cancelled
    call is cancelled inside them, and their `finally` runs at once."""

    async def write(self, message: T_contra) -> None: ...


@asynccontextmanager
async def statuses(context: object) -> AsyncIterator[None]:
    """Ends the RPC with the status of whatever is raised inside. Cancellation passes."""
    try:
        yield
    except PdserveError as error:
        await abort(context, error)
    except EngineError as error:
        await abort(context, typed(error))
    except Exception as error:  # a bug: reported under its id, and the worker lives on
        error_id = uuid.uuid4().hex[:12]
        log.exception("error_id=%s", error_id)
        await abort(context, Internal(f"internal error {error_id}: {type(error).__name__}"))


async def abort(context: object, error: PdserveError) -> NoReturn:
    """A caller that is gone meanwhile hears nothing: then the call counts as cancelled."""
    try:
        await cast(_Abortable, context).abort_with_status(to_status(error))
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None
