"""Several processes' expositions as one: what the library would make of them, line by line."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from router.metrics.exposition import Exposition

Sample = tuple[str, tuple[tuple[str, str], ...], float]


def parsed(text: str, labels: Mapping[str, str] | None = None) -> list[Sample]:
    return sorted(
        (sample.name, tuple(sorted((sample.labels | dict(labels or {})).items())), sample.value)
        for family in text_string_to_metric_families(text)
        if not family.name.endswith("_created")
        for sample in family.samples
    )


def process(seed: int) -> str:
    """Everything that the format has, awkward label values too."""
    registry = CollectorRegistry()
    Gauge("plain", "No labels.", registry=registry).set(seed + 0.5)
    many = Counter("many", 'Quotes " and\nlines.', ["a", "b"], registry=registry)
    for value in ("x", "", 'say "hi"', "a\\b", "two\nlines", "{brace}", "sp ace", "ü", "\u2028", "\r"):
        many.labels(value, "y").inc(seed)
    times = Histogram("times_seconds", "Times.", ["phase"], buckets=(0.1, 1.0), registry=registry)
    times.labels("one").observe(0.05 * seed)
    Gauge("infinite", "", registry=registry).set(float("inf"))
    return generate_latest(registry).decode()


def test_every_sample_says_who_said_it_and_keeps_its_value() -> None:
    whole, expected = Exposition(), []
    for index in range(3):
        labels = {"role": "decode", "worker": f'odd "{index}\\'}
        text = process(index + 1)
        whole.add(text, labels)
        expected += parsed(text, labels)
    assert parsed(whole.render()) == sorted(expected)


def test_a_family_stands_together_under_one_header() -> None:
    whole = Exposition()
    for index in range(3):
        whole.add(process(index + 1), {"worker": str(index)})
    text = whole.render()
    headers = [line for line in text.split("\n") if line.startswith("# TYPE ")]
    assert len(headers) == len(set(headers)) == 4
    names = [
        line.partition("{")[0].removesuffix("_total") for line in text.split("\n") if line and line[0] != "#"
    ]
    order = [name.split("_seconds")[0] for name in names]
    assert order == sorted(order, key=order.index)


def test_a_worker_that_tells_a_family_of_another_type_is_left_out_of_it_alone() -> None:
    whole = Exposition()
    whole.add("# HELP a A.\n# TYPE a gauge\na 1\n", {"worker": "0"})
    whole.add("# HELP a A.\n# TYPE a counter\na 2\n# HELP b B.\n# TYPE b gauge\nb 3\n", {"worker": "1"})
    assert parsed(whole.render()) == [("a", (("worker", "0"),), 1.0), ("b", (("worker", "1"),), 3.0)]


def test_garbage_makes_no_sample() -> None:
    whole = Exposition()
    whole.add("\x00\xff no family 1\n# TYPE\n# TYPE broken\n{} 1\n# a comment\n\n", {"worker": "0"})
    assert whole.render() == ""
