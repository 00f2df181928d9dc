"""What the pages say of failures is what tests assert: each row has its tests, each figure is the code's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cluster.actors import beats, guard
from cluster.control.health import Patience
from router.config import RouterSettings
from router.front import checks
from router.http import body, protocol

ROOT = Path(__file__).parents[2]
TOLD = ROOT / "tests" / "faults" / "README.md"
TEST = re.compile(r"`([\w/]+)::(test_\w+)`")
ROUTER, PATIENCE = RouterSettings(), Patience()


def rows(page: Path, heading: str) -> list[list[str]]:
    """Cells of the first table under the heading."""
    text = page.read_text().partition(f"\n## {heading}\n")[2]
    table = re.search(r"^\|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert table is not None, f"{page.name}: no table under {heading!r}"
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[1].splitlines()]


@pytest.mark.parametrize(
    ("page", "heading"),
    [
        (ROOT / "README.md", "What a client sees when things fail"),
        (ROOT / "docs" / "failures.md", "What happens inside"),
    ],
    ids=["README", "failures"],
)
def test_each_row_of_failures_names_its_tests_and_they_are_there(page: Path, heading: str) -> None:
    situations = [row[0] for row in rows(page, heading)]
    tested = rows(TOLD, heading)
    for situation, (name, tests) in zip(situations, tested, strict=True):
        assert situation.startswith(name.removesuffix(" …")), f"{situation!r} is not {name!r}"
        found = TEST.findall(tests)
        assert found or tests == "no test", situation
        for file, test in found:
            assert f"def {test}(" in (ROOT / "tests" / f"{file}.py").read_text(), f"{file}::{test}"


@pytest.mark.parametrize(
    ("page", "told"),
    [
        ("failures", f"says nothing for `router.suspect_after_s` ({ROUTER.suspect_after_s:g} s)"),
        ("failures", f"no sign of life for {PATIENCE.unhealthy_after_s:g} s"),
        ("failures", f"the controller's question each {'second' if PATIENCE.probe_every_s == 1 else '?'}"),
        ("failures", f"does not run is killed and replaced after {PATIENCE.dead_after_silent_s:g} s"),
        ("failures", f"{'ten' if PATIENCE.dead_after_steps == 10 else '?'} times the time of its steps"),
        ("failures", f"and no less than {PATIENCE.dead_after_s:g} s"),
        ("failures", f"after {PATIENCE.quarantine_s:g} s it is killed and replaced"),
        ("failures", f"within {guard._LOOK_EVERY_S:g} s ({guard._SILENT_AFTER_S:g} s where it hangs)"),
        ("failures", f"its keeper: no word for {beats._LOOK_S * beats._LOOKS_IN_VAIN:g} s"),
        ("failures", f"requests under way have {ROUTER.drain_s:g} s to end"),
        ("failures", f"`router.retry_budget` times ({ROUTER.retry_budget})"),
        ("security", f"`router.max_prompt_bytes`, {ROUTER.max_prompt_bytes >> 20} MiB"),
        ("security", f"`router.max_streams_per_connection`, {ROUTER.max_streams_per_connection}"),
        ("security", f"`router.max_queued_requests`, {ROUTER.max_queued_requests}"),
        ("security", f"`router.max_n`, {ROUTER.max_n}"),
        ("security", f"{checks.MAX_STOP_STRINGS}, of {checks.MAX_STOP_STRING_BYTES} bytes each"),
        ("security", f"{checks.MAX_STOP_TOKEN_IDS} stop token ids"),
        ("security", f"{checks.MAX_GRAMMAR_BYTES >> 10} KiB, a second to compile"),
        ("security", f"{protocol.MAX_HEAD_BYTES >> 10} KiB; {protocol.HEAD_TIMEOUT_S:g} s to come"),
        ("security", f"1 MiB; {body.MAX_READ_S:g} s to come"),
        ("security", f"| HTTP connections | {protocol.MAX_CONNECTIONS} |"),
    ],
)
def test_the_figures_that_the_pages_tell_are_those_of_the_code(page: str, told: str) -> None:
    assert told in " ".join((ROOT / "docs" / f"{page}.md").read_text().split())
