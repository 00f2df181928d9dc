"""The wire's errors: one family, mapped once to gRPC status and back.

    PdserveError
    ├── InvalidArgument      a parameter, a prompt, a length: asking again cannot help
    ├── NotFound             unknown model, worker or transfer
    ├── Unauthenticated      no key or secret, or a wrong one
    ├── PermissionDenied     a right key, and not for this
    ├── FailedPrecondition   layouts differ, no subscription, a hand-off used before
    ├── Unimplemented        has its field in the API, and no code behind it yet
    ├── ResourceExhausted    no room in time; says when to try again
    ├── Unavailable          no worker, or it went away before the first token
    ├── Aborted              the stream could not be resumed; the tokens so far are valid
    ├── DeadlineExceeded
    ├── Cancelled
    ├── DataLoss             KV arrived damaged, twice
    └── Internal             a bug; the log has the stack under the id in the message

A status carries google.rpc.ErrorInfo (domain "pdserve", reason as below) and, where `retry_after_s` is
set, google.rpc.RetryInfo.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, cast

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

DOMAIN = "pdserve"
# gRPC drops a status of more than 8 KiB, and the message is in it twice: percent-encoded (3 bytes for one)
# and in base64.
MAX_MESSAGE_BYTES = 1024


class PdserveError(Exception):
    """Base of every error that crosses a process border. `reason` is a stable UPPER_SNAKE word."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN
    default_reason: ClassVar[str] = "UNKNOWN"

    def __init__(
        self, message: str, *, reason: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.retry_after_s = retry_after_s

    @property
    def label(self) -> str:
        """Code and reason, for logs and traces: a message may quote what a client sent."""
        code = self.code.name
        return code if self.reason == code else f"{code} {self.reason}"


class InvalidArgument(PdserveError):
    code = grpc.StatusCode.INVALID_ARGUMENT
    default_reason = "INVALID_ARGUMENT"


class NotFound(PdserveError):
    code = grpc.StatusCode.NOT_FOUND
    default_reason = "NOT_FOUND"


class Unauthenticated(PdserveError):
    code = grpc.StatusCode.UNAUTHENTICATED
    default_reason = "UNAUTHENTICATED"


class PermissionDenied(PdserveError):
    code = grpc.StatusCode.PERMISSION_DENIED
    default_reason = "PERMISSION_DENIED"


class FailedPrecondition(PdserveError):
    code = grpc.StatusCode.FAILED_PRECONDITION
    default_reason = "FAILED_PRECONDITION"


class Unimplemented(PdserveError):
    code = grpc.StatusCode.UNIMPLEMENTED
    default_reason = "UNIMPLEMENTED"


class ResourceExhausted(PdserveError):
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    default_reason = "RESOURCE_EXHAUSTED"


class Unavailable(PdserveError):
    code = grpc.StatusCode.UNAVAILABLE
    default_reason = "UNAVAILABLE"


class Aborted(PdserveError):
    code = grpc.StatusCode.ABORTED
    default_reason = "ABORTED"


class DeadlineExceeded(PdserveError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED
    default_reason = "DEADLINE_EXCEEDED"


class Cancelled(PdserveError):
    code = grpc.StatusCode.CANCELLED
    default_reason = "CANCELLED"


class DataLoss(PdserveError):
    code = grpc.StatusCode.DATA_LOSS
    default_reason = "DATA_LOSS"


class Internal(PdserveError):
    code = grpc.StatusCode.INTERNAL
    default_reason = "INTERNAL"


_BY_CODE: dict[grpc.StatusCode, type[PdserveError]] = {
    kind.code: kind
    for kind in (
        InvalidArgument,
        NotFound,
        Unauthenticated,
        PermissionDenied,
        FailedPrecondition,
        Unimplemented,
        ResourceExhausted,
        Unavailable,
        Aborted,
        DeadlineExceeded,
        Cancelled,
        DataLoss,
        Internal,
    )
}
# By which a PdserveError can end a call.
CODE_NAMES: tuple[str, ...] = tuple(code.name for code in _BY_CODE)
_BY_NUMBER: dict[int, type[PdserveError]] = {code.value[0]: kind for code, kind in _BY_CODE.items()}


def from_code(number: int, message: str, reason: str | None = None) -> PdserveError:
    """The error for a google.rpc.Code number (as in `SequenceFailed.code`)."""
    return _BY_NUMBER.get(number, Internal)(message, reason=reason)


def to_status(error: PdserveError) -> grpc.Status:
    """What `context.abort_with_status` takes. A message that is too long to be sent is cut."""
    status = status_pb2.Status(code=error.code.value[0], message=_sendable(error.message))
    info = any_pb2.Any()
    info.Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN))
    status.details.append(info)
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        retry = any_pb2.Any()
        retry.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        status.details.append(retry)
    return rpc_status.to_status(status)


def _sendable(message: str) -> str:
    raw = message.encode(errors="replace")
    if len(raw) <= MAX_MESSAGE_BYTES:
        return raw.decode()
    return raw[:MAX_MESSAGE_BYTES].decode(errors="ignore") + "…"


def from_rpc_error(error: grpc.RpcError) -> PdserveError:
    """The typed error behind a failed call, whether or not its details are ours."""
    kind = _BY_CODE.get(error.code(), Internal)
    message = error.details() or error.code().name
    reason: str | None = None
    retry_after_s: float | None = None
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    for detail in _details(error):
        if _is_unpacked(detail, info):
            reason = info.reason
        elif _is_unpacked(detail, retry):
            retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
    return kind(message, reason=reason, retry_after_s=retry_after_s)


def _is_unpacked(detail: any_pb2.Any, message: Message) -> bool:
    """Whether it was of that kind. One that says so and is not counts as not there."""
    try:
        return detail.Unpack(message)
    except DecodeError:
        message.Clear()
        return False


def _details(error: grpc.RpcError) -> Sequence[any_pb2.Any]:
    """None where a stranger on the way gave details that contradict the status, or are none."""
    try:
        # What a failed call raises is a Call as well; the stubs do not say so.
        status = rpc_status.from_call(cast("grpc.Call", error))
    except (ValueError, DecodeError):
        return ()
    return status.details if status is not None else ()
