"""Server-sent events of OpenAI's API, read as cheaply as can be: one line is one event."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from pdserve.bench.serve.client import Answer, RequestFailed


class Heard:
    """What one stream has said so far."""

    def __init__(self, on_tokens: Callable[[], None]) -> None:
        self.on_tokens = on_tokens
        self.usage: Mapping[str, object] = {}
        self.is_finished = False

    def answer(self) -> Answer:
        """At the stream's end. Raises RequestFailed where it came too soon."""
        if not self.is_finished:
            raise RequestFailed("BROKEN_STREAM", "the stream ended without a finish_reason")
        details = self.usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
        return Answer(
            _count(self.usage.get("prompt_tokens")),
            _count(cached),
            _count(self.usage.get("completion_tokens")),
        )


def parse(line: bytes, heard: Heard) -> None:
    """Raises RequestFailed for an error that the server sends in the stream."""
    if not line.startswith(b"data:"):
        return  # a comment, or the empty line between events
    data = line[5:].strip()
    if data == b"[DONE]":
        return
    try:
        chunk = json.loads(data)
        error = chunk.get("error")
        if error is not None:
            raise _failed(error)
        for choice in chunk.get("choices") or ():
            _hear(choice, heard)
        if (usage := chunk.get("usage")) is not None:
            heard.usage = usage
    except (ValueError, AttributeError, TypeError) as error:
        raise RequestFailed("BROKEN_STREAM", f"no chunk of OpenAI's API: {data[:80]!r}") from error


def _hear(choice: Mapping[str, object], heard: Heard) -> None:
    """Raises RequestFailed for a second answer: gaps between the arrivals of two are nobody's."""
    if choice.get("index"):
        raise RequestFailed("SEVERAL_ANSWERS", "the server sends several answers to a request: ask for one")
    is_last = choice.get("finish_reason") is not None
    # Behind the end comes usage, from some servers with an empty choice.
    if not heard.is_finished and _has_tokens(choice, is_last):
        heard.on_tokens()
    heard.is_finished = heard.is_finished or is_last


def _has_tokens(choice: Mapping[str, object], is_last: bool) -> bool:
    """A token may have no text (part of a character); a chunk that only names the role, or only ends the
    stream, has none either.
    """
    if choice.get("token_ids"):
        return True
    delta = choice.get("delta")
    if isinstance(delta, Mapping):
        if any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls")):
            return True
        return not is_last and "role" not in delta
    return bool(choice.get("text")) or not is_last


def _failed(error: object) -> RequestFailed:
    if isinstance(error, Mapping):
        return RequestFailed(str(error.get("code") or "ERROR"), str(error.get("message") or error))
    return RequestFailed("ERROR", str(error))


def _count(value: object) -> int | None:
    return value if isinstance(value, int) else None
