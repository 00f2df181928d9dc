"""A collector in this process: takes spans by OTLP, over gRPC and over HTTP, and keeps them."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2

Value = str | int | float | bool | list[str]


@dataclass(frozen=True)
class SeenSpan:
    name: str
    service: str
    trace_id: str
    span_id: str
    parent: str
    begin_ns: int
    end_ns: int
    attributes: Mapping[str, Value]
    events: tuple[tuple[str, Mapping[str, Value]], ...]
    # None: it went well.
    error: str | None
    state: str

    def of(self, name: str) -> Value:
        return self.attributes[f"pdserve.{name}"]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.raw: list[bytes] = []
        self.spans: list[SeenSpan] = []
        self._lock = threading.Lock()

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: object
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        with self._lock:
            self.raw.append(request.SerializeToString())
            for resource in request.resource_spans:
                service = _values(resource.resource.attributes)["service.name"]
                for scope in resource.scope_spans:
                    self.spans += [_seen(str(service), span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str) -> list[SeenSpan]:
        return [span for span in self.spans if span.name == name]


def _seen(service: str, span: trace_pb2.Span) -> SeenSpan:
    is_error = span.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    return SeenSpan(
        name=span.name,
        service=service,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        begin_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_values(span.attributes),
        events=tuple((event.name, _values(event.attributes)) for event in span.events),
        error=span.status.message if is_error else None,
        state=span.trace_state,
    )


def _values(pairs: Iterator[KeyValue]) -> dict[str, Value]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Value:
    which = value.WhichOneof("value")
    if which == "array_value":
        return [each.string_value for each in value.array_value.values]
    plain: Value = getattr(value, which)
    return plain


@contextmanager
def over_grpc(collector: Collector) -> Iterator[str]:
    """Its endpoint."""
    server = grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait(5)


@contextmanager
def over_http(collector: Collector) -> Iterator[str]:
    """Its endpoint; spans are taken at the usual path only."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            if self.path == "/v1/traces":
                collector.Export(trace_service_pb2.ExportTraceServiceRequest.FromString(body), None)
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        serving.join(5)
