"""A quantile is as good as the bounds between which it lies."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from router.metrics.requests import RequestMetrics

REGISTRY = CollectorRegistry()
METRICS = RequestMetrics(REGISTRY)


@pytest.mark.parametrize(
    "name",
    [
        "request_queue_time",
        "request_prefill_time",
        "time_to_first_token",
        "inter_token_latency",
        "request_time_per_output_token",
        "request_decode_start_time",
    ],
)
def test_the_times_of_a_short_prompt_are_told_apart(name: str) -> None:
    (family,) = [each for each in REGISTRY.collect() if each.name == f"pdserve_{name}_seconds"]
    bounds = [float(each.labels["le"]) for each in family.samples if each.name.endswith("_bucket")]
    for seconds in (0.0025, 0.015, 0.045, 0.2, 1.2):
        below = max((bound for bound in bounds if bound < seconds), default=0.0)
        above = min(bound for bound in bounds if bound >= seconds)
        assert 0.0 < above <= 5 * below
