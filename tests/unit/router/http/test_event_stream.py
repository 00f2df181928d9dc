"""The end of a stream, where its client reads slowly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace

import pytest
from starlette.requests import Request
from starlette.types import Message

from pdserve.v1.errors import Aborted
from router.deadline import Deadline
from router.http import event_stream
from router.http.calls import completion_call
from router.http.connections import Connections
from router.http.event_stream import EventStream
from router.http.protocol import ABORT
from router.http.requests import CompletionRequest
from router.http.shape import Shape
from router.outputs import Delta, Finished, Output, Started
from router.text.transcript import Piece


class TextShape(Shape):
    id_prefix, whole_object, chunk_object = "x", "x", "x"

    def choice(self, collected: object) -> dict[str, object]:
        return {}

    def opening(self, started: Started) -> None:
        return None

    def delta(self, delta: Delta) -> dict[str, object]:
        return {"text": delta.piece.text}

    def closing(self, finished: Finished) -> dict[str, object]:
        return {}


async def said(*, fails: bool) -> AsyncGenerator[Output, None]:
    yield Delta(0, Piece("a", (1,), ()))
    if fails:
        raise Aborted("its workers are lost")


class SlowClient:
    """Takes the last part late."""

    def __init__(self, *, fails: bool) -> None:
        self.is_hung_up = False
        self.bodies: list[bytes] = []
        app = SimpleNamespace(state=SimpleNamespace(connections=Connections()))
        state = {ABORT: self._hang_up}
        scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "app": app, "state": state}
        self._scope = scope
        call = completion_call(CompletionRequest.model_validate({"prompt": "x", "stream": True}), "r")
        self._stream = EventStream(
            Request(scope, self._receive), said(fails=fails), Deadline(60.0), TextShape(call, "m"), {}
        )

    async def take(self) -> None:
        await asyncio.wait_for(self._stream(self._scope, self._receive, self._send), 20.0)

    def _hang_up(self) -> None:
        self.is_hung_up = True

    async def _receive(self) -> Message:
        await asyncio.Event().wait()
        raise AssertionError("nothing is received")

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            if not message["more_body"]:
                await asyncio.sleep(0.3)
            self.bodies.append(message["body"])


@pytest.mark.parametrize("fails", [False, True], ids=["whole", "broken"])
async def test_only_a_broken_answer_hurries_a_slow_client(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "_LAST_WORDS_S", 0.05)
    client = SlowClient(fails=fails)
    await client.take()
    assert client.is_hung_up == fails
    assert (client.bodies[-2:] == [b"data: [DONE]\n\n", b""]) == (not fails)
