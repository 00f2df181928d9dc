"""What is traced of a prompt whose call ends early."""

from __future__ import annotations

import asyncio

import pytest

from engine.request import NewToken, SequenceRequest
from engine.sampling import FinishReason, SamplingParams, StopConditions
from kv_transfer.frame import TransferKey
from kv_transfer.transfer import TransferReport
from observability.origin import Origin, TraceContext
from observability.tracing import Attributes
from prefill_worker.prefill import FirstToken
from prefill_worker.record import recorded
from worker.record import Recorder

REQUEST = SequenceRequest("a/1", (1, 2), (), SamplingParams(), StopConditions(8))
TOKEN = NewToken(0, 42, None)
GOES_ON, IS_ALL = FirstToken(TOKEN, None, None), FirstToken(TOKEN, FinishReason.LENGTH, None)
SHIPPED = TransferReport(1.0, 10, 1, 0)


class Spans:
    """Keeps how each span ended: its name and its error."""

    def __init__(self) -> None:
        self.ended: list[tuple[str, str | None]] = []

    def span(
        self,
        name: str,
        parent: TraceContext | None,
        attributes: Attributes,
        started_at_ns: int | None = None,
        is_entry: bool = False,
    ) -> One:
        return One(name, self.ended)

    def close(self) -> None:
        return


class One:
    context = None

    def __init__(self, name: str, ended: list[tuple[str, str | None]]) -> None:
        self._name = name
        self._ended = ended

    def set(self, attributes: Attributes) -> None:
        return

    def note(self, event: str, attributes: Attributes, at_ns: int | None = None) -> None:
        return

    def end(self, error: str | None = None) -> None:
        self._ended.append((self._name, error))


@pytest.mark.parametrize(
    ("events", "spans"),
    [
        ([], [("prefill", "CANCELLED")]),
        ([GOES_ON], [("prefill", None), ("transfer", "CANCELLED")]),
        # The router has all, and cancels before it hears that there was no more.
        ([IS_ALL], [("prefill", None)]),
        ([GOES_ON, SHIPPED], [("prefill", None), ("transfer", None)]),
    ],
)
def test_a_cancel_is_an_error_of_what_was_left_to_do(
    events: list[FirstToken | TransferReport], spans: list[tuple[str, str | None]]
) -> None:
    tracer = Spans()
    record = Recorder("prefill-0", tracer).record(TransferKey("a", 1), Origin())

    def work() -> None:
        with recorded(record, REQUEST) as prefill:
            for event in events:
                prefill.note(event)
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        work()
    assert tracer.ended == spans
