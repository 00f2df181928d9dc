"""Whose work this is: the client's request id and its W3C trace context, on their way through the processes.

They travel as gRPC metadata, beside the messages: workers never act on them, they only log and trace.
https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
# Any text in UTF-8: what clients call their requests need not be ASCII.
REQUEST_ID = "x-request-id-bin"

Metadata = tuple[tuple[str, str | bytes], ...]

_TRACEPARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)
_SAMPLED = 1
# What the standard asks everybody to hand on at least.
_MAX_STATE_CHARACTERS = 512


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A place in a trace: the span whose children come next. Ids in lower-case hex."""

    trace_id: str
    span_id: str
    is_sampled: bool
    # Of tracing systems on the way, handed on as it came.
    state: str = ""

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{int(self.is_sampled):02x}"


@dataclass(frozen=True, slots=True)
class Origin:
    """None: not known, or not traced."""

    request_id: str | None = None
    trace: TraceContext | None = None

    def metadata(self) -> Metadata:
        entries: list[tuple[str, str | bytes]] = []
        if self.request_id is not None:
            entries.append((REQUEST_ID, self.request_id.encode()))
        if self.trace is not None:
            entries.append((TRACEPARENT, self.trace.traceparent))
            if self.trace.state:
                entries.append((TRACESTATE, self.trace.state))
        return tuple(entries)

    @property
    def trace_id(self) -> str | None:
        return self.trace.trace_id if self.trace is not None else None


def read_trace(traceparent: str | None, states: Iterable[str] = ()) -> TraceContext | None:
    """What is malformed counts as not there, as the standard has it."""
    match = _TRACEPARENT.fullmatch(traceparent.strip()) if traceparent is not None else None
    if match is None or match["version"] == "ff" or (match["version"] == "00" and match["more"]):
        return None
    if not int(match["trace"], 16) or not int(match["span"], 16):
        return None
    return TraceContext(
        match["trace"], match["span"], bool(int(match["flags"], 16) & _SAMPLED), _joined(states)
    )


def _joined(states: Iterable[str]) -> str:
    state = ",".join(each.strip() for each in states)
    is_sound = len(state) <= _MAX_STATE_CHARACTERS and state.isascii() and state.isprintable()
    return state if is_sound else ""


def trace_of(metadata: Iterable[tuple[str, str | bytes]]) -> TraceContext | None:
    """Of a call's metadata, whoever made it."""
    entries = [(key, value) for key, value in metadata if isinstance(value, str)]
    parents = [value for key, value in entries if key == TRACEPARENT]
    states = [value for key, value in entries if key == TRACESTATE]
    return read_trace(parents[0], states) if len(parents) == 1 else None


def origin_of(metadata: Iterable[tuple[str, str | bytes]]) -> Origin:
    """Of a router's call."""
    entries = tuple(metadata)
    names = [value for key, value in entries if key == REQUEST_ID and isinstance(value, bytes)]
    request_id = names[0].decode(errors="replace") if names else None
    return Origin(request_id, trace_of(entries))
