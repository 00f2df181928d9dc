"""A sequence on this worker as log lines and one span, `decode` (it joined the batch → its last token here).

Of a prompt that is computed here there is a `prefill` span before it.
"""

from __future__ import annotations

import time

from engine.request import PrefillReport
from kv_transfer.handover import HandOver
from kv_transfer.transfer import PushTarget
from observability.moments import Moment
from observability.tracing import NO_SPAN, Span
from worker.record import Record, prefill_figures

_NS_PER_MS = 1e6


class DecodeRecord:
    """Used on the asyncio loop only. `num_tokens` are those drawn here."""

    def __init__(self, record: Record) -> None:
        self.num_tokens = 0
        self._record = record
        self._decode: Span = NO_SPAN
        self._is_reserved = False

    @property
    def ids(self) -> dict[str, object]:
        """For a log call's `extra`."""
        return self._record.ids

    def reserved(self, target: PushTarget | None) -> None:
        """None: its prompt is computed here."""
        self._is_reserved = True
        if target is None:
            self._record.tell(Moment.RESERVED)
        else:
            self._record.tell(
                Moment.RESERVED, num_blocks=target.num_blocks, num_cached_blocks=target.num_cached_blocks
            )

    def prefilled(self, report: PrefillReport) -> None:
        """Here, just now."""
        figures = prefill_figures(report)
        self._record.tell(Moment.PREFILL_END, **figures)
        began_at_ns = time.time_ns() - int((report.queue_ms + report.prefill_ms) * _NS_PER_MS)
        self._record.span("prefill", began_at_ns, **figures).end()
        self.begun()

    def begun(self) -> None:
        self._record.tell(Moment.DECODE_BEGIN)
        self._decode = self._record.span("decode")

    def handed_over(self, handover: HandOver) -> None:
        """With its first step."""
        self._decode.set(
            {"pdserve.handover_ms": handover.ready_ms, "pdserve.decode_start_ms": handover.first_step_ms}
        )

    def ended(self, outcome: str, is_error: bool) -> None:
        if self._is_reserved:
            self._record.tell(Moment.FINISHED, outcome=outcome, num_tokens=self.num_tokens)
        self._decode.set({"pdserve.num_tokens": self.num_tokens, "pdserve.outcome": outcome})
        self._decode.end(outcome if is_error else None)
