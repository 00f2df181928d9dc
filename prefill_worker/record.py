"""A prompt on this worker as log lines and two spans: `prefill` (accepted → first token) and `transfer`
(first block pushed → commit acknowledged), most of which runs beside the first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from engine.request import SequenceRequest
from kv_transfer.transfer import TransferReport
from observability.moments import Moment
from prefill_worker.prefill import FirstToken
from worker.record import Record, outcome, prefill_figures

_NS_PER_MS = 1e6


class PrefillRecord:
    def __init__(self, record: Record, request: SequenceRequest) -> None:
        self._record = record
        self._num_tokens = len(request.prompt_token_ids) + len(request.known_token_ids)
        record.tell(Moment.PREFILL_BEGIN, num_tokens=self._num_tokens)
        self._prefill = record.span("prefill", num_tokens=self._num_tokens)
        # Of the first token; from then on an error is the transfer's.
        self._first_at_ns: int | None = None
        # All went well: a router that has what it wants may cancel before it hears that this was all.
        self._is_done = False

    def note(self, event: FirstToken | TransferReport) -> None:
        if isinstance(event, FirstToken):
            self._note_first(event)
        else:
            self._note_transfer(event)

    def _note_first(self, first: FirstToken) -> None:
        self._first_at_ns = time.time_ns()
        figures = prefill_figures(first.report)
        self._record.tell(Moment.PREFILL_END, num_tokens=self._num_tokens, **figures)
        self._prefill.set({f"pdserve.{name}": value for name, value in figures.items()})
        self._prefill.end()
        self._is_done = first.finish_reason is not None

    def _note_transfer(self, report: TransferReport) -> None:
        figures: dict[str, int | float] = {
            "num_blocks": report.num_blocks,
            "transfer_bytes": report.transfer_bytes,
            "hidden_bytes": report.hidden_bytes,
            "transfer_ms": report.transfer_ms,
        }
        self._record.tell(Moment.TRANSFER_END, **figures)
        began_at_ns = time.time_ns() - int(report.transfer_ms * _NS_PER_MS)
        self._record.span("transfer", began_at_ns, **figures).end()
        self._is_done = True

    def fail(self, error: str) -> None:
        if self._is_done:
            return
        self._record.tell(Moment.FINISHED, outcome=error)
        if self._first_at_ns is None:
            self._prefill.end(error)
        else:
            self._record.span("transfer", self._first_at_ns).end(error)


@contextmanager
def recorded(record: Record, request: SequenceRequest) -> Iterator[PrefillRecord]:
    """Around the whole of a Prefill call; what is raised inside is told."""
    prefill = PrefillRecord(record, request)
    try:
        yield prefill
    except asyncio.CancelledError:
        prefill.fail("CANCELLED")
        raise
    except Exception as error:  # told, and raised again
        prefill.fail(outcome(error))
        raise
