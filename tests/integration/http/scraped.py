"""What a router's /metrics says, as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.integration.http.raw import get


@dataclass(frozen=True)
class Scraped:
    families: Mapping[str, Metric]

    @property
    def samples(self) -> list[Sample]:
        return [sample for family in self.families.values() for sample in family.samples]

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples of that name that have these labels; there is at least one."""
        found = [
            sample.value
            for sample in self.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert found, f"no {name} {labels}"
        return sum(found)


async def scrape(address: str | None) -> Scraped:
    assert address is not None
    answer = await get(address, "/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = list(text_string_to_metric_families(answer.body.decode()))
    assert len({family.name for family in families}) == len(families), "a family is there twice"
    scraped = Scraped({family.name: family for family in families})
    keys = [(sample.name, tuple(sorted(sample.labels.items()))) for sample in scraped.samples]
    assert len(set(keys)) == len(keys), "a sample is there twice"
    return scraped
