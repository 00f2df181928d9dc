"""What a worker logs and traces of one attempt at a sequence, under the ids that came with its call.

A line or a span has counts, times and ids: no token of prompt or answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, cast

from engine.errors import EngineError
from engine.request import PrefillReport
from kv_transfer.frame import TransferKey
from observability.logs import fields
from observability.moments import Moment
from observability.origin import Origin, origin_of
from observability.tracing import NO_TRACER, Span, Tracer
from pdserve.v1.errors import PdserveError
from worker.statuses import typed

log = logging.getLogger(__name__)


class _Called(Protocol):
    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...


def origin_of_call(context: object) -> Origin:
    """`context`: a grpc.aio.ServicerContext."""
    return origin_of(cast(_Called, context).invocation_metadata() or ())


@dataclass(frozen=True, slots=True)
class Recorder:
    """One worker's. Closes the tracer that it was given."""

    worker_id: str
    tracer: Tracer

    def record(self, key: TransferKey, origin: Origin) -> Record:
        return Record(self, key, origin)

    async def close(self) -> None:
        if self.tracer is not NO_TRACER:
            await asyncio.to_thread(self.tracer.close)


@dataclass(frozen=True, slots=True)
class Record:
    recorder: Recorder
    key: TransferKey
    origin: Origin

    @property
    def ids(self) -> dict[str, object]:
        """For a log call's `extra`."""
        return fields(
            request_id=self.origin.request_id,
            transfer_id=self.key.transfer_id,
            epoch=self.key.epoch,
            worker=self.recorder.worker_id,
            trace_id=self.origin.trace_id,
        )

    def tell(self, moment: Moment, **figures: object) -> None:
        if log.isEnabledFor(logging.INFO):
            log.info(moment.value, extra=self.ids | fields(**figures))

    def span(self, name: str, started_at_ns: int | None = None, **figures: str | int | float) -> Span:
        """Begun now, or earlier (Unix nanoseconds)."""
        attributes: dict[str, str | int | float] = {
            "pdserve.worker": self.recorder.worker_id,
            "pdserve.transfer_id": self.key.transfer_id,
            "pdserve.epoch": self.key.epoch,
        }
        attributes |= {f"pdserve.{figure}": value for figure, value in figures.items()}
        if self.origin.request_id is not None:
            attributes["pdserve.request_id"] = self.origin.request_id
        tracer, parent = self.recorder.tracer, self.origin.trace
        return tracer.span(name, parent, attributes, started_at_ns, is_entry=True)


def outcome(error: Exception) -> str:
    """What went wrong, without a word that may quote somebody's prompt."""
    if isinstance(error, EngineError):
        error = typed(error)
    return error.label if isinstance(error, PdserveError) else type(error).__name__


def prefill_figures(report: PrefillReport | None) -> dict[str, int | float]:
    if report is None:
        return {}
    return {
        "cached_tokens": report.cached_tokens,
        "queue_ms": report.queue_ms,
        "prefill_ms": report.prefill_ms,
    }
