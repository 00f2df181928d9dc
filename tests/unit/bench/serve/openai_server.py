"""A server that speaks as much of OpenAI's API as a load test hears, and says what each test wants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from aiohttp import web


def chunk(choice: dict[str, object], **more: object) -> bytes:
    return event({"choices": [choice], **more})


def event(data: object) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def tokens(*texts: str) -> list[bytes]:
    """Completion chunks, one token each, the last of them with the end."""
    chunks = [chunk({"text": text, "finish_reason": None}) for text in texts[:-1]]
    return [*chunks, chunk({"text": texts[-1], "finish_reason": "length"})]


DONE = b"data: [DONE]\n\n"
USAGE = event(
    {
        "choices": [],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
    }
)


class OpenAIServer:
    """`script` is what is sent, write by write; the stream then ends, or stays open where `is_endless`."""

    def __init__(self) -> None:
        self.url = ""
        self.status = 200
        self.models: object = {"data": [{"id": "made", "max_model_len": 100}]}
        self.script: Sequence[bytes] = [*tokens("a", "b", "c"), USAGE, DONE]
        self.is_endless = False
        self.bodies: list[dict[str, object]] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self.written = asyncio.Event()
        self.closed = asyncio.Event()

    async def list_models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self.models, status=self.status)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.paths.append(request.path)
        self.keys.append(request.headers.get("Authorization"))
        if self.status != 200:
            return web.Response(body=b"".join(self.script), status=self.status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in self.script:
            await response.write(part)
        self.written.set()
        if self.is_endless:
            try:
                await asyncio.Event().wait()
            finally:
                self.closed.set()
        return response


@asynccontextmanager
async def openai_server() -> AsyncIterator[OpenAIServer]:
    server = OpenAIServer()
    app = web.Application()
    app.router.add_get("/v1/models", server.list_models)
    app.router.add_post("/v1/completions", server.answer)
    app.router.add_post("/v1/chat/completions", server.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}"
    yield server
    await runner.cleanup()
