"""`pdserve bench transfer` as it is typed, on a tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner, Result

from pdserve.bench.errors import BenchError
from pdserve.bench.transfer_plan import Plan, parse_tokens
from pdserve.cli.app import app
from tests.integrity import wait_until
from tests.models import tiny_model
from tests.processes import command_of

ALL = ["shm", "collective", "grpc"]
COMMAND = (sys.executable, "-m", "pdserve.cli.main", "bench", "transfer")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models"))


def bench(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "transfer", "--model", str(folder), *arguments])


def test_json_has_each_transport_beside_its_bare_medium(folder: Path) -> None:
    done = bench(folder, "--tokens", "40,16", "--rounds", "1", "--requests", "0", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert [(row["transport"], row["tokens"]) for row in told["rows"]] == [
        (transport, tokens) for transport in ALL for tokens in (16, 40)
    ]
    for row in told["rows"]:
        assert set(row) == {"transport", "tokens", "gb_s", "bare_gb_s", "share"}
        assert row["bare_gb_s"] > 0
        assert row["share"] > 0
    assert told["handover"] == []


def test_tables_name_what_they_show(folder: Path) -> None:
    done = bench(folder, "--transport", "grpc", "--tokens", "16", "--rounds", "1", "--requests", "0")
    assert done.exit_code == 0, done.output
    assert "bare" in done.stdout
    assert "collective" not in done.stdout
    # In a pipe there is no bar: lines say what goes on.
    assert done.stderr.splitlines()[:2] == ["loading libraries", "raw rate of grpc"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--tokens", "64,0"], "'64,0' is not a list of prompt lengths"),
        (["--tokens", "many"], "'many' is not a list of prompt lengths"),
        (["--transport", "pigeon"], "--transport"),
        (["--requests", "-1"], "--requests"),
    ],
)
def test_what_is_no_choice_is_wrong_usage(
    folder: Path, arguments: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    done = bench(folder, *arguments)
    assert done.exit_code == 2
    assert told in done.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--tokens", "16,2045"), "2045 tokens and an answer of 4"),  # before the raw rates are measured
        (("--tokens", "2049", "--requests", "0"), "2049 tokens"),
    ],
)
def test_a_prompt_longer_than_the_context_is_told(
    folder: Path, arguments: tuple[str, ...], told: str
) -> None:
    error = bench(folder, *arguments).exception
    assert isinstance(error, BenchError)
    assert str(error) == f"{told} do not fit in the model's context of 2048"


def test_long_prompts_are_asked_less_often() -> None:
    plan = Plan(parse_tokens(" 4000, 64,64"), 5, None, 512)
    assert plan.tokens == (64, 4000)
    assert [plan.num_requests(tokens) for tokens in plan.tokens] == [100, 10]
    assert plan.num_rounds_in_all(3) == 3 * (5 + 110)


@pytest.mark.full
@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_real_requests_hand_over_what_their_prompts_have(folder: Path) -> None:
    arguments = ("--transport", "grpc", "--tokens", "40", "--rounds", "1", "--requests", "3", "--json")
    done = bench(folder, *arguments)
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    (row,) = told["handover"]
    assert set(row) == {"transport", "tokens", "p50_ms", "p99_ms", "hidden_share"}
    assert 0 < row["p50_ms"] <= row["p99_ms"]
    assert 0 <= row["hidden_share"] < 1
    (start,) = told["first_step"]
    assert start["p50_ms"] > row["p50_ms"]
    (shipped,) = told["shipped"]
    assert shipped["bytes_shipped"] == shipped["bytes_computed"] > 0


@pytest.mark.cluster
@pytest.mark.timeout(240)
@pytest.mark.parametrize("moment", ["sending_process", pytest.param("ray", marks=pytest.mark.full)])
def test_ctrl_c_leaves_nothing_behind(folder: Path, tmp_path: Path, moment: str) -> None:
    """While raw transfers run, and while a cluster starts."""
    arguments = ("--model", str(folder), "--transport", "grpc", "--tokens", "16")
    rounds = "100000" if moment == "sending_process" else "1"
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    process = subprocess.Popen(
        [*COMMAND, *arguments, "--rounds", rounds], stderr=subprocess.PIPE, text=True, env=environment
    )
    below: set[psutil.Process] = set()

    def has_begun() -> bool:
        below.update(psutil.Process(process.pid).children(recursive=True))
        return any(moment in command_of(each) for each in below)

    try:
        assert wait_until(has_begun, timeout_s=100)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "interrupted" in said
    assert "Traceback" not in said
    assert wait_until(lambda: not any(map(command_of, below)), timeout_s=40)
    assert not list((tmp_path / "pdserve").glob("*/cluster.json"))
