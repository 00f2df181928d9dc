"""The figures, from records made by hand."""

from __future__ import annotations

import pytest

from pdserve.bench.serve.records import Failure
from pdserve.bench.serve.stalls import stalls
from pdserve.bench.serve.summary import summarize
from tests.unit.bench.serve.made import record


def test_everything_counts_from_the_scheduled_time() -> None:
    late = record([1.5, 1.6, 1.9], at_s=1.0, lag_s=0.4)
    assert late.ttft_s == pytest.approx(0.5)
    assert late.e2el_s == pytest.approx(0.9)
    assert late.lag_s == pytest.approx(0.4)
    assert late.tpot_s == pytest.approx(0.2)
    assert late.gaps_s == pytest.approx((0.1, 0.3))


def test_tpot_is_by_tokens_where_several_come_at_once() -> None:
    assert record([1.0, 2.0, 3.0], num_tokens=9).tpot_s == pytest.approx(0.25)


def test_tbt_is_the_mean_of_the_longest_tenth() -> None:
    arrivals = [0.0]
    for gap in [0.1] * 18 + [1.0, 3.0]:
        arrivals.append(arrivals[-1] + gap)
    assert record(arrivals).tbt_s == pytest.approx(2.0)
    assert record([0.0, 0.5]).tbt_s == pytest.approx(0.5)


def test_one_token_has_no_time_between_tokens() -> None:
    single = record([0.2])
    assert (single.ttft_s, single.tpot_s, single.tbt_s, single.gaps_s) == (0.2, None, None, ())
    assert record().ttft_s is None


def test_failures_are_counted_by_code_and_take_no_part_in_latencies() -> None:
    refused = Failure("RESOURCE_EXHAUSTED", "the queue is full")
    summary = summarize(
        [
            record([0.1, 0.2, 0.3]),
            record([3.0], at_s=1.0, failure=Failure("ABORTED", "lost")),
            record(at_s=2.0, failure=refused),
            record(at_s=3.0, lag_s=0.5, failure=Failure("RESOURCE_EXHAUSTED", "still full")),
        ]
    )
    assert (summary.num_requests, summary.num_ok, summary.num_failed) == (4, 1, 3)
    assert [(each.code, each.count, each.example) for each in summary.failures] == [
        ("RESOURCE_EXHAUSTED", 2, "the queue is full"),
        ("ABORTED", 1, "lost"),
    ]
    assert summary.ttft_ms is not None
    assert (summary.ttft_ms.max, summary.num_tokens) == (pytest.approx(100), 3)
    assert summary.lag_ms is not None
    assert summary.lag_ms.max == pytest.approx(500)


def test_rates_are_over_the_time_to_the_last_end() -> None:
    summary = summarize([record([0.5, 1.0]), record([2.0, 4.0], at_s=1.0)])
    assert summary.duration_s == 4.0
    assert (summary.request_rate, summary.token_rate, summary.total_token_rate) == (0.5, 1.0, 6.0)
    assert summary.max_concurrency == 1
    assert summarize([record([3.0]), record([4.0], at_s=1.0), record([3.5], at_s=3.0)]).max_concurrency == 2


def test_percentiles_are_of_all_gaps_of_all_requests() -> None:
    summary = summarize([record([0.0, 0.1, 0.3]), record([0.0, 0.4])])
    assert summary.itl_ms is not None
    assert (summary.itl_ms.p50, summary.itl_ms.max) == (pytest.approx(200), pytest.approx(400))
    assert summary.itl_ms.mean == pytest.approx(700 / 3)


def test_nothing_at_all_has_no_latencies() -> None:
    summary = summarize([])
    assert (summary.ttft_ms, summary.request_rate, summary.max_concurrency) == (None, 0.0, 0)


def test_stalls_are_a_share_of_the_streams_time() -> None:
    records = [record([0.0, 0.05, 0.35]), record([0.0, 0.05, 0.1]), record(failure=Failure("X", "x"))]
    found = stalls(records)
    assert found.stalled_share == pytest.approx(0.3 / 0.45)
    assert (found.longest_ms, found.stream_s) == (pytest.approx(300), pytest.approx(0.45))
    assert stalls(records, between_s=(0.0, 0.2)).stalled_share == 0.0
    assert stalls([]).stalled_share == 0.0
