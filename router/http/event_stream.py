"""An answer as server-sent events, one for each output, and `[DONE]` behind the last.

The status goes out with the first output: what fails before that is an ordinary error answer. What fails
later is an event that holds the error, and no `[DONE]` follows.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pdserve.v1.errors import PdserveError
from router.deadline import Deadline
from router.http.connections import Connection, hang_up
from router.http.errors import as_internal, error_body
from router.http.shape import Shape
from router.outputs import Output

# For a client that did not read in time to learn why its answer ends.
_LAST_WORDS_S = 5.0

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class EventStream(Response):
    media_type = "text/event-stream"

    def __init__(
        self,
        request: Request,
        outputs: AsyncGenerator[Output, None],
        deadline: Deadline,
        shape: Shape,
        headers: dict[str, str],
    ) -> None:
        # A proxy that kept the events back until there are more would undo the streaming.
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"} | headers)
        del self.headers["content-length"]
        self._request = request
        self._outputs = outputs
        self._deadline = deadline
        self._shape = shape
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        last: dict[str, object] | None = None
        try:
            with self._shape.words.spoken():
                await self._stream(send)
        except PdserveError as error:
            if not self._has_begun:
                raise
            last = error_body(error)
        except Exception as error:
            if not self._has_begun:
                raise
            last = error_body(as_internal(error))
        if last is None:
            # It is all on its way; the connection ends a client that takes nothing.
            await self._end(send)
            return
        try:
            await asyncio.wait_for(self._complain(send, last), _LAST_WORDS_S)
        except asyncio.TimeoutError:
            await hang_up(self._request)

    async def _complain(self, send: Send, error: dict[str, object]) -> None:
        await self._say(send, error)
        await self._end(send)

    async def _end(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _stream(self, send: Send) -> None:
        shape = self._shape
        async with Connection(self._request), self._deadline, aclosing(self._outputs) as outputs:
            async for output in outputs:
                if not self._has_begun:
                    await self._begin(send)
                shape.note(output)
                if (chunk := shape.chunk(output)) is not None:
                    await self._say(send, chunk)
            if shape.style.include_usage:
                await self._say(send, shape.usage_chunk())
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})

    async def _begin(self, send: Send) -> None:
        self._has_begun = True
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

    async def _say(self, send: Send, event: dict[str, object]) -> None:
        body = f"data: {_encode(event)}\n\n".encode()
        await send({"type": "http.response.body", "body": body, "more_body": True})
