"""W3C trace context and the request id, in and out of a call's metadata."""

from __future__ import annotations

import pytest

from observability.origin import Origin, TraceContext, origin_of, read_trace, trace_of

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    "traceparent",
    [
        None,
        "",
        "nonsense",
        f"00-{TRACE}-{SPAN}",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-01\nx",
        "00-" + "9" * 100_000,
    ],
)
def test_a_malformed_traceparent_counts_as_none(traceparent: str | None) -> None:
    assert read_trace(traceparent, ["a=1"]) is None


def test_a_later_version_may_say_more() -> None:
    assert read_trace(f"01-{TRACE}-{SPAN}-00-more") == TraceContext(TRACE, SPAN, is_sampled=False)


def test_several_tracestate_headers_are_one_list_and_what_is_too_long_is_dropped() -> None:
    assert read_trace(PARENT, ["a=1", " b=2"]) == TraceContext(TRACE, SPAN, True, "a=1,b=2")
    assert read_trace(PARENT, ["a=" + "1" * 600]) == TraceContext(TRACE, SPAN, True)
    assert read_trace(PARENT, ["a=\n"]) is not None


@pytest.mark.parametrize("request_id", [None, "mine", "a\nb", "\U0001f600" * 20, ""])
@pytest.mark.parametrize(
    "trace", [None, TraceContext(TRACE, SPAN, True, "a=1"), TraceContext(TRACE, SPAN, False)]
)
def test_what_goes_out_as_metadata_comes_in_the_same(
    request_id: str | None, trace: TraceContext | None
) -> None:
    origin = Origin(request_id, trace)
    assert origin_of(origin.metadata()) == origin


def test_two_traceparents_are_none() -> None:
    entries = (("traceparent", PARENT), ("traceparent", PARENT))
    assert trace_of(entries) is None
    assert trace_of(entries[:1]) == TraceContext(TRACE, SPAN, True)
