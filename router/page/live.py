"""The last requests as server-sent events: all that are known at first, then what changes.

Each event is {"now": seconds, "requests": [timeline, …]}; of a timeline that was told before, only the
deliveries of tokens since then (`tokens.start` is the number of the first). Newest first. Who names a
`request_id` is told of that one as long as it is known, however many come after it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pdserve.v1.errors import PdserveError
from router.http.connections import Connection, hang_up
from router.recent.recent import Recent

# As many as are told of at once; others come back into view as these grow old.
MAX_SHOWN = 40
# Fewer and fuller events are cheaper beside the streams of tokens.
_PAUSE_S = 0.25
# Deliveries that one event tells of, or one timeline's: a page that opens holds up no stream of tokens.
_PORTION = 512
# A proxy on the way may close what is silent.
_SILENCE_S = 15.0
# For a page that does not read to hear that its stream ends.
_LAST_WORDS_S = 1.0

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class LiveRequests(Response):
    media_type = "text/event-stream"

    def __init__(self, request: Request, recent: Recent) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._request = request
        self._recent = recent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        own = self._request.query_params.get("request_id")
        try:
            async with (
                Connection(self._request, is_watcher=True),
                aclosing(events(self._recent, own)) as told,
            ):
                async for event in told:
                    await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        except PdserveError:
            pass  # the page was closed, or the router stops: it opens another stream by itself
        end = send({"type": "http.response.body", "body": b"", "more_body": False})
        try:
            await asyncio.wait_for(end, _LAST_WORDS_S)
        except asyncio.TimeoutError:
            await hang_up(self._request)


async def events(recent: Recent, request_id: str | None = None) -> AsyncGenerator[str, None]:
    seen = _Seen(request_id)
    with recent.watch() as changed:
        while True:
            changed.clear()
            for requests in seen.news(recent):
                yield f"data: {_encode({'now': time.time(), 'requests': requests})}\n\n"
                await asyncio.sleep(0)
            await asyncio.sleep(_PAUSE_S)
            # Not by wait_for: before Python 3.12 it loses a cancel that comes with the change.
            change = asyncio.ensure_future(changed.wait())
            try:
                while not (await asyncio.wait({change}, timeout=_SILENCE_S))[0]:
                    yield ": nothing new\n\n"
            finally:
                change.cancel()


class _Seen:
    """What one page has been told: of each timeline its version, and how many deliveries."""

    def __init__(self, request_id: str | None) -> None:
        self._request_id = request_id
        self._told: dict[str, tuple[int, int]] = {}

    def news(self, recent: Recent) -> Iterator[list[dict[str, object]]]:
        """In portions, at least one."""
        newest = recent.newest(MAX_SHOWN, self._request_id)
        told: list[dict[str, object]] = []
        num_new = 0
        for timeline in newest:
            version, num_deliveries = self._told.get(timeline.id, (-1, 0))
            if timeline.version != version:
                told.append(timeline.as_object(num_deliveries))
                num_known = len(timeline.tokens.at_ms)
                self._told[timeline.id] = (timeline.version, num_known)
                num_new += num_known - num_deliveries
            if num_new >= _PORTION:
                yield told
                told, num_new = [], 0
        ids = {timeline.id for timeline in newest}
        self._told = {id: what for id, what in self._told.items() if id in ids}
        yield told
