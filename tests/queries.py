"""What the dashboard and the alerts under docs/ ask of Prometheus."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import promql_parser as promql
import yaml

DOCS = Path(__file__).parents[1] / "docs"
DASHBOARD = DOCS / "grafana" / "pdserve.json"
ALERTS = DOCS / "prometheus" / "alerts.yml"

Object: TypeAlias = "dict[str, object]"
# Grafana's variables, as a user would see them filled in.
_VARIABLES = {"$__rate_interval": "1m", "$model_name": ".*", "$worker": ".*"}


@dataclass(frozen=True)
class Query:
    where: str
    text: str
    # Names of labels that the legend shows.
    legend: frozenset[str] = frozenset()

    def nodes(self) -> list[promql.Expr]:
        """Raises ValueError where it is no PromQL."""
        found: list[promql.Expr] = []
        promql.walk(promql.parse(self.text), found.append)  # type: ignore[arg-type]
        return found

    def selectors(self) -> list[promql.VectorSelector]:
        return [node for node in self.nodes() if isinstance(node, promql.VectorSelector)]

    def groupings(self) -> set[str]:
        """All labels that something is summed by."""
        modifiers = [node.modifier for node in self.nodes() if isinstance(node, promql.AggregateExpr)]
        return {label for modifier in modifiers if modifier is not None for label in modifier.labels}


def panels() -> list[dict]:  # type: ignore[type-arg]  # as JSON has it
    return json.loads(DASHBOARD.read_text())["panels"]


def dashboard_queries() -> Iterator[Query]:
    for panel in panels():
        for target in panel.get("targets", ()):
            text = target["expr"]
            for name, value in _VARIABLES.items():
                text = text.replace(name, value)
            legend = re.findall(r"{{(\w+)}}", target["legendFormat"])
            yield Query(f"{panel['title']} {target['refId']}", text, frozenset(legend))


def alert_queries() -> Iterator[Query]:
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            shown = re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])
            yield Query(rule["alert"], rule["expr"], frozenset(shown))
