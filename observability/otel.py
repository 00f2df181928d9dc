"""The one module that imports OpenTelemetry: spans by its SDK, sent in batches on a thread of its own.

What the SDK reads from the environment (OTEL_EXPORTER_OTLP_HEADERS, certificates, queue sizes) counts too.
"""

from __future__ import annotations

import threading
import time

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, StatusCode, TraceFlags
from opentelemetry.trace.span import TraceState

from observability.config import TraceProtocol, TracesConfig
from observability.origin import TraceContext
from observability.tracing import Attributes, Service, Span

# A collector that does not answer must not hold up a process that ends.
_CLOSE_TIMEOUT_S = 3.0
# The SDK's own default is five seconds, all of which a process that is killed would lose.
_BATCH_MS = 1000
_HTTP_PATH = "/v1/traces"


def otlp_exporter(config: TracesConfig) -> SpanExporter:
    if config.protocol is TraceProtocol.GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGrpc

        return OverGrpc(endpoint=config.endpoint)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp

    has_path = config.endpoint.count("/") > 2 and not config.endpoint.endswith("/")
    return OverHttp(endpoint=config.endpoint if has_path else config.endpoint.rstrip("/") + _HTTP_PATH)


class OtelTracer:
    """Implements Tracer."""

    def __init__(self, service: Service, exporter: SpanExporter, sample_ratio: float = 1.0) -> None:
        resource = Resource.create(
            {
                "service.name": f"pdserve-{service.kind}",
                "service.namespace": service.cluster,
                "service.instance.id": service.instance,
            }
        )
        sampler = ParentBased(TraceIdRatioBased(sample_ratio))
        self._provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=_BATCH_MS))
        self._tracer = self._provider.get_tracer("pdserve")

    def span(
        self,
        name: str,
        parent: TraceContext | None,
        attributes: Attributes,
        started_at_ns: int | None = None,
        is_entry: bool = False,
    ) -> Span:
        # An empty context, not the current one: nothing of ours is current.
        around = trace.set_span_in_context(trace.INVALID_SPAN if parent is None else _remote(parent))
        kind = SpanKind.SERVER if is_entry else SpanKind.INTERNAL
        begun = self._tracer.start_span(
            name, around, kind=kind, attributes=attributes, start_time=started_at_ns
        )
        return _OtelSpan(begun)

    def close(self) -> None:
        closing = threading.Thread(target=self._provider.shutdown, name="close-traces", daemon=True)
        closing.start()
        closing.join(_CLOSE_TIMEOUT_S)


class _OtelSpan:
    def __init__(self, span: trace.Span) -> None:
        self._span = span

    @property
    def context(self) -> TraceContext | None:
        context = self._span.get_span_context()
        return TraceContext(
            trace.format_trace_id(context.trace_id),
            trace.format_span_id(context.span_id),
            context.trace_flags.sampled,
            context.trace_state.to_header(),
        )

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(dict(attributes))

    def note(self, event: str, attributes: Attributes, at_ns: int | None = None) -> None:
        self._span.add_event(event, attributes, at_ns)

    def end(self, error: str | None = None) -> None:
        if error is not None:
            self._span.set_status(StatusCode.ERROR, error)
        self._span.end(time.time_ns())


def _remote(context: TraceContext) -> trace.Span:
    flags = TraceFlags(TraceFlags.SAMPLED if context.is_sampled else TraceFlags.DEFAULT)
    state = TraceState.from_header([context.state]) if context.state else None
    return trace.NonRecordingSpan(
        trace.SpanContext(int(context.trace_id, 16), int(context.span_id, 16), True, flags, state)
    )
