"""`--help` of the benchmarks, in a terminal of the usual width."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from pdserve.bench.rows import ROWS
from pdserve.cli.app import app


def help_of(command: str) -> str:
    done = CliRunner().invoke(app, ["bench", command, "--help"], env={"COLUMNS": "80"})
    assert done.exit_code == 0
    return done.output


def test_the_engine_s_help_names_its_rows_and_a_short_run() -> None:
    told = help_of("engine")
    assert [row.name for row in ROWS if row.name not in told] == []
    assert "--rounds 1" in told


@pytest.mark.parametrize("command", ["engine", "transfer"])
def test_help_fits_into_80_columns(command: str) -> None:
    lines = [line.strip(" │") for line in help_of(command).splitlines()]
    description = lines[: lines.index("Examples:")]
    # A line that was broken by the terminal leaves a word or two on the next one.
    assert all(len(line) > 30 for line in description if line and not line.endswith((".", ":")))
    assert not any("…" in line for line in lines)


def test_serve_s_help_explains_its_argument() -> None:
    told = help_of("serve")
    assert "[NAME:MS]..." in told
    assert "More objectives, behind --goodput's first" in told


def test_every_transport_stands_whole_in_the_help() -> None:
    assert all(name in help_of("transfer").split() for name in ("shm,", "collective,"))
