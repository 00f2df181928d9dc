"""Spans, as the rest of us sees them. Where no endpoint is set there is `NO_TRACER`, and OpenTelemetry is not
even imported.

Times are Unix nanoseconds. Attributes are counts, times, ids and settings: never a prompt or an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from observability.config import TracesConfig
from observability.origin import TraceContext

Attributes = Mapping[str, str | bool | int | float | Sequence[str]]


@dataclass(frozen=True, slots=True)
class Service:
    """Who makes the spans: "router", or a worker's role, of which cluster, and which one."""

    kind: str
    cluster: str
    instance: str


class Span(Protocol):
    """Any thread. Nothing counts after `end`."""

    @property
    def context(self) -> TraceContext | None:
        """None: not traced at all."""

    def set(self, attributes: Attributes) -> None: ...

    def note(self, event: str, attributes: Attributes, at_ns: int | None = None) -> None:
        """Something that happened within it."""

    def end(self, error: str | None = None) -> None:
        """`error`: a status' name and reason, without details."""


class Tracer(Protocol):
    def span(
        self,
        name: str,
        parent: TraceContext | None,
        attributes: Attributes,
        started_at_ns: int | None = None,
        is_entry: bool = False,
    ) -> Span:
        """Begun now, or earlier. `is_entry`: its parent is in another process."""

    def close(self) -> None:
        """Sends what is left, in bounded time. Blocks."""


class _NoSpan:
    context = None

    def set(self, attributes: Attributes) -> None:
        return

    def note(self, event: str, attributes: Attributes, at_ns: int | None = None) -> None:
        return

    def end(self, error: str | None = None) -> None:
        return


class _NoTracer:
    def span(
        self,
        name: str,
        parent: TraceContext | None,
        attributes: Attributes,
        started_at_ns: int | None = None,
        is_entry: bool = False,
    ) -> Span:
        return NO_SPAN

    def close(self) -> None:
        return


NO_SPAN: Span = _NoSpan()
NO_TRACER: Tracer = _NoTracer()


def make_tracer(config: TracesConfig | None, service: Service) -> Tracer:
    if config is None:
        return NO_TRACER
    from observability.otel import OtelTracer, otlp_exporter

    return OtelTracer(service, otlp_exporter(config), config.sample_ratio)
