"""The dashboard is one that Grafana reads, and the alerts are rules that Prometheus reads."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations

import promql_parser as promql
import pytest
import yaml

from router.http.errors import TABLE
from tests.queries import ALERTS, DASHBOARD, DOCS, Query, alert_queries, dashboard_queries, panels

DASH = json.loads(DASHBOARD.read_text())


def lost(written: object, read: object, path: str = "$") -> Iterator[str]:
    """Where what was read back says less than, or something other than, what was written."""
    if isinstance(written, dict):
        for key, value in written.items():
            if not isinstance(read, dict) or key not in read:
                if value is not None:
                    yield f"{path}.{key}"
            else:
                yield from lost(value, read[key], f"{path}.{key}")
    elif isinstance(written, list):
        if not isinstance(read, list) or len(read) != len(written):
            yield path
        else:
            for index, pair in enumerate(zip(written, read, strict=True)):
                yield from lost(*pair, f"{path}[{index}]")
    elif written != read:
        yield f"{path}: {written!r} is read as {read!r}"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Grafana's SDK wants Python 3.11")
def test_grafanas_own_types_know_every_key_of_the_dashboard() -> None:
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    read_back = json.loads(json.dumps(Dashboard.from_json(DASH), cls=JSONEncoder))
    assert list(lost(DASH, read_back)) == []
    wrong = json.loads(json.dumps(DASH))
    wrong["panels"][1]["options"]["colourMode"] = "value"
    read_back = json.loads(json.dumps(Dashboard.from_json(wrong), cls=JSONEncoder))
    assert list(lost(wrong, read_back)) == ["$.panels[1].options.colourMode"]


def test_the_dashboard_can_be_imported_as_it_is() -> None:
    assert DASH["uid"] == "pdserve"
    assert "id" not in DASH, "an id belongs to one Grafana's database"
    variables = {variable["name"] for variable in DASH["templating"]["list"]}
    assert set(re.findall(r"\$\{?([a-z_]+)", json.dumps(DASH))) - {"__rate_interval", "__all"} == variables
    for panel in panels():
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert panel["targets"]


def test_panels_have_their_own_ids_titles_and_places() -> None:
    for key in ("id", "title"):
        values = [panel[key] for panel in panels()]
        assert len(set(values)) == len(values)
    places = [panel["gridPos"] for panel in panels()]
    assert all(at["x"] >= 0 and at["x"] + at["w"] <= 24 for at in places)
    for one, other in combinations(places, 2):
        is_beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        is_above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert is_beside or is_above, f"{one} lies over {other}"


QUERIES = [*dashboard_queries(), *alert_queries()]


@pytest.mark.parametrize("query", [pytest.param(query, id=query.where) for query in QUERIES])
def test_every_query_is_promql_and_shows_labels_that_it_keeps(query: Query) -> None:
    assert query.selectors()
    if query.groupings():
        assert query.legend <= query.groupings()


@pytest.mark.parametrize("query", [pytest.param(query, id=query.where) for query in QUERIES])
def test_what_every_router_tells_of_the_same_worker_is_summed_once(query: Query) -> None:
    sums = [
        node for node in query.nodes() if isinstance(node, promql.AggregateExpr) and str(node.op) == "sum"
    ]
    for each in sums:
        assert [name for name in told_in(each.expr) if is_told_by_every_router(name)] == []


def told_in(expr: promql.Expr) -> list[str]:
    """The names in it that no further aggregation stands before."""
    if isinstance(expr, promql.AggregateExpr):
        return []
    if isinstance(expr, promql.MatrixSelector):
        return told_in(expr.vector_selector)
    if isinstance(expr, promql.VectorSelector):
        return [str(expr.name)]
    parts: list[promql.Expr] = []
    if isinstance(expr, promql.Call):
        parts = list(expr.args)
    elif isinstance(expr, promql.BinaryExpr):
        parts = [expr.lhs, expr.rhs]
    elif isinstance(expr, promql.ParenExpr):
        parts = [expr.expr]
    return [name for part in parts for name in told_in(part)]


def is_told_by_every_router(name: str) -> bool:
    """By docs/metrics.md: what stands behind the heading of what clients feel."""
    _, behind = (DOCS / "metrics.md").read_text().split("\n## The cluster: the router\n")
    told = re.findall(r"^\| `(pdserve_\w+)`", behind, re.MULTILINE)
    return name.startswith("process_") or re.sub("_(bucket|sum|count)$", "", name) in told


def test_every_alert_says_how_grave_it_is_and_what_it_means() -> None:
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"].keys() == {"summary"}


def test_the_alert_on_failures_counts_what_http_says_is_the_servers_fault() -> None:
    (query,) = [query for query in alert_queries() if query.where == "PdserveRequestsFail"]
    (counted,) = re.findall(r'code=~"([A-Z_|]+)"', query.text)
    faults = {kind.code.name for kind, answer in TABLE.items() if answer.status >= 500}
    assert set(counted.split("|")) == faults


def test_the_example_scrapes_the_path_that_is_served_and_finds_the_alerts() -> None:
    example = yaml.safe_load((DOCS / "prometheus" / "prometheus.yml").read_text())
    (job,) = example["scrape_configs"]
    assert (job["job_name"], job["metrics_path"]) == ("pdserve", "/metrics")
    assert [(DOCS / "prometheus" / name).is_file() for name in example["rule_files"]] == [True]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool here")
def test_promtool_has_nothing_to_say_against_it() -> None:
    command = ["promtool", "check", "config", str(DOCS / "prometheus" / "prometheus.yml")]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr
