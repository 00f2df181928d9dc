"""One request as spans: `generate` around it, `queue` and `reserve` within; its workers make the others.

What is traced is counts, times and ids. Statuses go without their messages, which may quote a client.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from observability.origin import Origin, TraceContext
from observability.tracing import NO_SPAN, NO_TRACER, Attributes, Span, Tracer
from pdserve.v1 import generation_pb2
from router.deadline import Deadline
from router.events import LifetimeEvent
from router.failure import FAILURES, failure_of
from router.outputs import Finished, Output, Started


@dataclass(slots=True)
class RequestTrace:
    """Of one message of a client, all its sequences."""

    tracer: Tracer = NO_TRACER
    span: Span = NO_SPAN
    # Where its work belongs: in its own span, or in the client's where there is none.
    context: TraceContext | None = None
    num_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)

    def origin(self, request_id: str) -> Origin:
        """What its workers are told."""
        return Origin(request_id, self.context)

    @property
    def trace_id(self) -> str | None:
        return self.context.trace_id if self.context is not None else None

    def note(self, output: Output) -> None:
        """As it goes out. Nothing of a Delta."""
        if self.span is NO_SPAN:
            return
        if isinstance(output, Started):
            self.span.set(_start(output))
        elif isinstance(output, Finished):
            self.num_tokens += output.usage.completion_tokens
            self.finish_reasons.append(generation_pb2.FinishReason.Name(output.ending.reason))
            self.span.set(_end(output, self.num_tokens, self.finish_reasons))

    def note_moment(self, event: LifetimeEvent) -> None:
        if self.span is NO_SPAN:
            return
        attributes = {"pdserve.transfer_id": event.transfer_id}
        if event.worker is not None:
            attributes["pdserve.worker"] = event.worker
        if event.outcome is not None:
            attributes["pdserve.outcome"] = event.outcome
        ago_s = time.monotonic() - event.at
        self.span.note(event.moment.value, attributes, time.time_ns() - int(ago_s * 1e9))

    @contextmanager
    def phase(self, name: str, attributes: Attributes) -> Iterator[Span]:
        span = self.tracer.span(name, self.context, attributes)
        with ended(span):
            yield span


class Tracing:
    def __init__(self, tracer: Tracer, model: str) -> None:
        self.tracer = tracer
        self._model = model

    async def close(self) -> None:
        if self.tracer is not NO_TRACER:
            await asyncio.to_thread(self.tracer.close)

    @contextmanager
    def request(
        self, message: generation_pb2.GenerateRequest, deadline: Deadline, caller: TraceContext | None
    ) -> Iterator[RequestTrace]:
        """Around the whole of one request. What is raised inside is its error."""
        if self.tracer is NO_TRACER:
            yield RequestTrace(context=caller)
            return
        span = self.tracer.span("generate", caller, _request(message, self._model), is_entry=True)
        with ended(span, deadline):
            yield RequestTrace(self.tracer, span, span.context)

    @contextmanager
    def several(
        self, num_messages: int, deadline: Deadline, caller: TraceContext | None
    ) -> Iterator[TraceContext | None]:
        """Around several requests that are one to their client: the parent of their spans."""
        span = self.tracer.span("generate_all", caller, {"pdserve.num_prompts": num_messages}, is_entry=True)
        with ended(span, deadline):
            yield span.context or caller


@contextmanager
def ended(span: Span, deadline: Deadline | None = None) -> Iterator[None]:
    """Ends it, with the error where one is raised."""
    error: str | None = None
    try:
        yield
    except FAILURES as raised:
        error = failure_of(raised, deadline).label
        raise
    finally:
        span.end(error)


def _request(message: generation_pb2.GenerateRequest, model: str) -> Attributes:
    """Under OpenTelemetry's names where it has any (its conventions for generative AI)."""
    attributes: dict[str, str | int | float] = {"gen_ai.request.model": model}
    if message.HasField("n"):
        attributes["pdserve.n"] = message.n
    if message.stop.HasField("max_tokens"):
        attributes["gen_ai.request.max_tokens"] = message.stop.max_tokens
    for name in ("temperature", "top_p"):
        if message.sampling.HasField(name):
            attributes[f"gen_ai.request.{name}"] = getattr(message.sampling, name)
    return attributes


def _start(started: Started) -> Attributes:
    return {
        "pdserve.request_id": started.request_id,
        "gen_ai.usage.input_tokens": started.prompt_tokens,
        "pdserve.cached_tokens": started.cached_tokens,
    }


def _end(finished: Finished, num_tokens: int, finish_reasons: list[str]) -> Attributes:
    timings = finished.timings
    return {
        "gen_ai.usage.output_tokens": num_tokens,
        "gen_ai.response.finish_reasons": finish_reasons,
        "pdserve.num_resumes": finished.num_resumes,
        "pdserve.prefill_worker": finished.prefill_worker,
        "pdserve.decode_worker": finished.decode_worker,
        "pdserve.ttft_ms": timings.ttft_ms,
        "pdserve.queue_ms": timings.queue_ms,
        "pdserve.prefill_ms": timings.prefill_ms,
        "pdserve.transfer_bytes": timings.transfer_bytes,
        "pdserve.handover_ms": timings.handover_ms,
        "pdserve.mean_itl_ms": timings.mean_itl_ms,
    }
