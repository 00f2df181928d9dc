"""OpenAI's API: /v1/models, /v1/completions, /v1/chat/completions."""

from __future__ import annotations

import math
import time
import uuid
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from observability.origin import TRACEPARENT, TRACESTATE, TraceContext, read_trace
from pdserve.v1.errors import InvalidArgument, NotFound
from router.deadline import Deadline
from router.http.answers import Collected
from router.http.body import Room, read_body
from router.http.calls import Call, chat_call, completion_call
from router.http.chat import ChatShape
from router.http.completions import CompletionShape
from router.http.connections import Connection
from router.http.errors import HEADERS
from router.http.event_stream import EventStream
from router.http.requests import ChatCompletionRequest, CompletionRequest
from router.http.shape import Shape
from router.router import Router

# Seconds that the client gives its request; a proxy on the way may set it too.
TIMEOUT_HEADER = "x-request-timeout"
REQUEST_ID_HEADER = "x-request-id"
# Of the largest size, while they are coming.
_MAX_LARGE_BODIES = 16


def routes(router: Router) -> list[BaseRoute]:
    api = OpenAI(router)
    return [
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", api.model),
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
    ]


class OpenAI:
    def __init__(self, router: Router) -> None:
        self._router = router
        self._name = router.config.model
        self._created = int(time.time())
        # A character may take three times its bytes as JSON (\ud83d\ude00); the rest is for all else.
        self._max_body_bytes = 3 * router.config.max_prompt_bytes + (1 << 20)
        self._room = Room(_MAX_LARGE_BODIES * self._max_body_bytes)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._describe()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._name:
            raise NotFound(f"model {name!r} is not served here", reason="MODEL")
        return JSONResponse(self._describe())

    async def completions(self, request: Request) -> Response:
        began_s, timeout_s = time.monotonic(), self._timeout_s(request)
        asked = await read_body(request, CompletionRequest, self._max_body_bytes, timeout_s, self._room)
        deadline = self._deadline(timeout_s, began_s)
        call = completion_call(
            asked,
            _request_id(request, asked.request_id),
            self._router.config.max_queued_requests,
            self._router.max_model_len,
        )
        return await self._answer(
            request, call, deadline, CompletionShape(call, self._name, self._router.codec)
        )

    async def chat(self, request: Request) -> Response:
        began_s, timeout_s = time.monotonic(), self._timeout_s(request)
        asked = await read_body(request, ChatCompletionRequest, self._max_body_bytes, timeout_s, self._room)
        deadline = self._deadline(timeout_s, began_s)
        call = chat_call(asked, _request_id(request, asked.request_id))
        return await self._answer(request, call, deadline, ChatShape(call, self._name, self._router.codec))

    def _deadline(self, timeout_s: float, began_s: float) -> Deadline:
        return Deadline(timeout_s, time.monotonic() - began_s, lambda: self._router.table.reason_to_wait)

    async def _answer(self, request: Request, call: Call, deadline: Deadline, shape: Shape) -> Response:
        # Where the client names no limit: all that fits.
        outputs = self._router.generate_all(
            call.messages, deadline, self._router.max_model_len, _caller(request)
        )
        headers = _headers(call.request_id)
        if call.style.stream:
            return EventStream(request, outputs, deadline, shape, headers)
        answers: dict[int, Collected] = {}
        with call.words.spoken():
            async with Connection(request), deadline, aclosing(outputs):
                async for output in outputs:
                    shape.note(output)
                    answers.setdefault(output.index, Collected()).add(output)
        return JSONResponse(shape.whole(answers), headers=headers)

    def _timeout_s(self, request: Request) -> float:
        value = request.headers.get(TIMEOUT_HEADER)
        if value is None:
            return self._router.config.default_timeout_s
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            complaint = f"the header {TIMEOUT_HEADER} is a number of seconds above 0, not {value!r}"
            raise InvalidArgument(complaint)
        return seconds

    def _describe(self) -> dict[str, object]:
        model = self._router.describe_model()
        return {
            "id": model.id,
            "object": "model",
            "created": self._created,
            "owned_by": "pdserve",
            "max_model_len": model.max_model_len,
            "vocab_size": model.vocab_size,
        }


def _request_id(request: Request, given: str | None) -> str:
    request_id = given or request.headers.get(REQUEST_ID_HEADER) or uuid.uuid4().hex
    setattr(request.state, HEADERS, _headers(request_id))
    return request_id


def _caller(request: Request) -> TraceContext | None:
    return read_trace(request.headers.get(TRACEPARENT), request.headers.getlist(TRACESTATE))


def _headers(request_id: str) -> dict[str, str]:
    """Whatever a client calls its request, a header holds plain characters only."""
    return {REQUEST_ID_HEADER: request_id} if request_id.isascii() and request_id.isprintable() else {}
