"""The one table from our errors to HTTP: status, OpenAI's `type`, and whether asking again can help.

The body is OpenAI's: {"error": {"message", "type", "param", "code"}}. `code` is our reason in lower case,
or the word that OpenAI's clients look for; `param` is the field that the message names.
"""

from __future__ import annotations

import logging
import math
import re
import uuid
from dataclasses import dataclass
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ExceptionHandler

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
)

logger = logging.getLogger(__name__)

# nginx's: the client closed the connection. Nobody but a log sees it.
CLIENT_CLOSED_REQUEST = 499
# The key in a request's state of headers that its answer has, whatever it is.
HEADERS = "answer_headers"
# Where an error says nothing better.
_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Mapped:
    status: int
    type: str
    # What `x-should-retry` tells OpenAI's SDK, which by itself repeats 408, 409, 429 and 5xx.
    can_retry: bool = False


TABLE: dict[type[PdserveError], Mapped] = {
    InvalidArgument: Mapped(400, "invalid_request_error"),
    Unimplemented: Mapped(400, "invalid_request_error"),
    NotFound: Mapped(404, "invalid_request_error"),
    Unauthenticated: Mapped(401, "invalid_request_error"),
    PermissionDenied: Mapped(403, "invalid_request_error"),
    # The whole time limit went by: another one would be spent alike.
    DeadlineExceeded: Mapped(408, "timeout_error"),
    ResourceExhausted: Mapped(429, "rate_limit_error", can_retry=True),
    Cancelled: Mapped(CLIENT_CLOSED_REQUEST, "cancelled"),
    FailedPrecondition: Mapped(500, "server_error"),
    DataLoss: Mapped(500, "server_error", can_retry=True),
    Internal: Mapped(500, "server_error"),
    Unavailable: Mapped(503, "server_error", can_retry=True),
    Aborted: Mapped(503, "server_error", can_retry=True),
}
# Reasons that HTTP has a status of its own for.
_BY_REASON = {
    "PROMPT_TOO_LARGE": Mapped(413, "invalid_request_error"),
    "BODY_TOO_LARGE": Mapped(413, "invalid_request_error"),
    "MEDIA_TYPE": Mapped(415, "invalid_request_error"),
}
_CODES = {"MODEL": "model_not_found", "INVALID_ARGUMENT": None, "UNAUTHENTICATED": "invalid_api_key"}
_FIELD = re.compile(r"([a-z_]+): ")


def mapped(error: PdserveError) -> Mapped:
    return _BY_REASON.get(error.reason) or TABLE.get(type(error), TABLE[Internal])


def error_body(error: PdserveError) -> dict[str, object]:
    kind = mapped(error)
    named = _FIELD.match(error.message) if kind.status in (400, 413) else None
    return {
        "error": {
            "message": error.message,
            "type": kind.type,
            "param": named.group(1) if named else None,
            "code": _CODES.get(error.reason, error.reason.lower()),
        }
    }


def error_response(error: PdserveError) -> Response:
    kind = mapped(error)
    headers = {"x-should-retry": "true" if kind.can_retry else "false"}
    if kind.can_retry:
        wait_s = _RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
        # Whole seconds are the standard; the other is what OpenAI's SDK prefers.
        headers["retry-after"] = str(max(1, math.ceil(wait_s)))
        headers["retry-after-ms"] = str(max(1, round(wait_s * 1000)))
    return JSONResponse(error_body(error), kind.status, headers)


def as_internal(error: Exception) -> Internal:
    """For a bug: the client gets an id under which the log has the stack."""
    error_id = uuid.uuid4().hex
    logger.error("bug error_id=%s", error_id, exc_info=error)
    return Internal(f"internal error {error_id}")


async def _answer_ours(request: Request, error: Exception) -> Response:
    response = error_response(error if isinstance(error, PdserveError) else as_internal(error))
    headers: dict[str, str] = getattr(request.state, HEADERS, {})
    response.headers.update(headers)
    return response


async def _answer_http(request: Request, error: Exception) -> Response:
    """What the routing itself refuses: an unknown path, a wrong method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = error.headers if isinstance(error, HTTPException) else None
    phrase = HTTPStatus(status).phrase
    body = {
        "message": f"{request.method} {request.url.path}: {phrase}",
        "type": "invalid_request_error",
        "param": None,
        "code": phrase.lower().replace(" ", "_"),
    }
    return JSONResponse({"error": body}, status, headers)


HANDLERS: dict[type[Exception] | int, ExceptionHandler] = {
    PdserveError: _answer_ours,
    HTTPException: _answer_http,
    # Starlette's outermost: a bug, wherever it is. It is raised again behind the answer.
    Exception: _answer_ours,
}
