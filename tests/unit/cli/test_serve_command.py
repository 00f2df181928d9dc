"""`pdserve bench serve` as it is typed, as far as it comes without a server, and its report."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pdserve.bench.serve.client import Served
from pdserve.bench.serve.goodput import Slo, goodput
from pdserve.bench.serve.load_test import Report, RunResult
from pdserve.bench.serve.records import Failure, RequestRecord
from pdserve.bench.serve.summary import summarize
from pdserve.bench.serve.sweep import Crossing, Point
from pdserve.bench.serve.trace import Trace, TraceRow
from pdserve.bench.serve.workloads import random_workload, trace_workload
from pdserve.cli import serve_report
from pdserve.cli.app import app
from tests.unit.bench.serve.made import record

NOBODY = ("--url", "http://127.0.0.1:9")
SLO = Slo(ttft_ms=500, tpot_ms=200)


@pytest.fixture(autouse=True)
def wide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "serve", *arguments])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--goodput", "ttft"], "--goodput ttft: write a limit as NAME:MILLISECONDS"),
        (["--goodput", "ttft:9", "speed:9"], "limits are set on ttft, tpot, tbt, e2el"),
        (["tpot:40"], "tpot:40: objectives are given by --goodput"),
        (["--find-goodput"], "--find-goodput wants --goodput"),
        (["--rates", "1,2"], "--rates is for --find-goodput"),
        (["--find-goodput", "--goodput", "ttft:9", "--rates", "1,x"], "write numbers with commas"),
        (["--find-goodput", "--goodput", "ttft:9", "--rates", "1,-2"], "a rate is above 0"),
        (["--rate", "0"], "has to be above 0"),
        (["--rate", "nan"], "has to be above 0"),
        (["--url", ""], "'': it begins with http://"),  # as of a variable that is not set
        (["--url", "localhost:8000"], "'localhost:8000': it begins with http:// or https://"),
        (["--extra-body", "[1]"], "write a JSON object"),
        (["--http"], "--url stands for itself"),
        (["--plot", "plot.txt"], "plot.txt: a plot's file ends in .png, .svg, .pdf"),
        (["--trace", "/nowhere"], "does not exist"),
        (["--workload", "sharegpt"], "is not one of"),
        (["--prefixes", "4"], "--prefixes has no use with --workload random"),
        (["--workload", "conversation", "--input-tokens", "9"], "--input-tokens has no use"),
        (["--max-output-tokens", "9"], "--max-output-tokens has no use with --workload random"),
        (["--trace", __file__, "--burstiness", "0.5"], "--burstiness has no use with --trace"),
        (["--trace", __file__, "--workload", "prefix"], "--workload has no use with --trace"),
        (["--sharegpt", __file__, "--max-input-tokens", "9"], "no use with --sharegpt"),
    ],
)
def test_wrong_usage_is_told(arguments: list[str], told: str) -> None:
    done = run(*NOBODY, *arguments)
    assert done.exit_code == 2, done.output
    assert told in " ".join(done.output.replace("│", " ").split())


@pytest.mark.parametrize("arguments", [["--model", "m"], ["--extra-body", "{}"]])
def test_what_only_http_has_is_not_taken_for_grpc(arguments: list[str]) -> None:
    done = run("--address", "127.0.0.1:9", *arguments)
    assert done.exit_code == 2, done.output
    assert f"{arguments[0]} is for HTTP: give --url or --http" in " ".join(done.output.split())


def test_a_trace_and_dialogues_exclude_each_other(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert "not both" in run(*NOBODY, "--trace", str(file), "--sharegpt", str(file)).output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (NOBODY, "no server answers at http://127.0.0.1:9/v1/models"),
        ((*NOBODY, "--plot", "/nowhere/plot.png"), "there is no such folder"),
        ((*NOBODY, "--output", "/nowhere/file.json"), "there is no such folder"),
    ],
)
def test_what_cannot_be_done_is_told_before_the_load(arguments: tuple[str, ...], told: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 1
    assert told in str(done.exception)


def result(records: list[RequestRecord], rate: float = 2.0, load: float = 0.1) -> RunResult:
    workload = random_workload(len(records), 5, 3, vocab_size=100).at_rate(rate)
    return RunResult(workload, tuple(records), summarize(records), goodput(records, SLO), load)


def report(*runs: RunResult, crossing: Crossing | None = None) -> Report:
    return Report(Served("tiny", 100, 100), 7, SLO, runs, crossing)


def test_results_are_kept_where_nobody_reads_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def measured(*_: object) -> Report:
        return report(result([record([0.1, 0.2])]))

    def closed(_: Report) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("pdserve.cli.bench_serve._measure", measured)
    monkeypatch.setattr("pdserve.cli.bench_serve.show", closed)
    file = tmp_path / "run.json"
    assert isinstance(run(*NOBODY, "--output", str(file)).exception, BrokenPipeError)
    assert json.loads(file.read_text())["model"] == "tiny"


def shown(made: Report, capsys: pytest.CaptureFixture[str]) -> str:
    serve_report.show(made)
    return capsys.readouterr().out


def test_the_table_has_the_fields_latencies(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(report(result([record([0.1, 0.2, 0.3]), record([1.0, 1.3])])), capsys)
    rows = {line.split("  ")[0].strip(): line.split()[-5:] for line in text.splitlines()}
    assert rows["TTFT"] == ["550.0", "550.0", "910.0", "991.0", "1000.0"]
    assert rows["TPOT"] == ["200.0", "200.0", "280.0", "298.0", "300.0"]
    assert {"ITL", "TBT", "E2EL", "send lag"} <= rows.keys()
    assert "random: 2 requests, 2/s" in text
    assert "50.0% of all requests met the objectives" in text
    assert "60.0% of their time in gaps over 100 ms, the longest 300 ms" in text


def test_failures_a_busy_client_and_late_sends_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    failed = record(failure=Failure("429", "[full]"), lag_s=0.3)
    text = shown(report(result([record([0.1, 0.2], num_tokens=9), failed], load=0.95)), capsys)
    assert "1 of 2 requests ended well" in text
    assert "1 failed with 429: [full]" in text
    assert "the client itself took 95% of a core" in text
    assert "sent up to 300 ms late" in text
    assert "4.5 tokens came at once" in text


def test_what_was_done_to_a_trace_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    rows = (TraceRow(0.0, 1024, 4, (1, 2)), TraceRow(1.0, 512, 900, (3,)))
    workload = trace_workload(Trace("made.jsonl", rows), block_tokens=16, vocab_size=100).at_rate(0.25)
    records = (record([0.1]), record([4.2], at_s=4.0))
    made = RunResult(workload, records, summarize(records), None, 0.0)
    text = shown(report(made), capsys)
    assert "made.jsonl: 2 requests, 0.25/s, its time stretched by 4, blocks of 512 tokens as 16" in text


@pytest.mark.parametrize(
    ("rate", "is_above", "told"),
    [
        (1.5, False, "1.5 requests/s"),
        (None, True, "at least 2 requests/s"),
        (None, False, "less than 1 requ"),
    ],
)
def test_a_search_ends_in_one_line(
    rate: float | None, is_above: bool, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    crossing = Crossing(rate, is_above, (Point(1.0, 0.95), Point(2.0, 0.85)), 0.9)
    runs = (result([record([0.1, 0.2])] * 2, 2.0), result([record([0.1, 0.2])] * 2, 1.0))
    text = shown(report(*runs, crossing=crossing), capsys)
    assert f"90% of requests within ttft:500 tpot:200 ms: {told}" in text
    assert [line.split()[0] for line in text.splitlines()[1:3]] == ["1", "2"]


def test_json_is_plain_and_has_requests_where_asked() -> None:
    made = report(result([record([0.1, 0.2]), record(failure=Failure("X", "x"))], rate=math.inf))
    told = json.loads(json.dumps(serve_report.as_object(made), allow_nan=False))
    (only,) = told["runs"]
    assert (told["model"], told["slo"]["ttft_ms"], only["workload"]["rate"]) == ("tiny", 500, None)
    assert (only["num_requests"], only["num_ok"], only["attainment"]) == (2, 1, 0.5)
    assert set(only["ttft_ms"]) == {"mean", "p50", "p90", "p99", "max"}
    assert "requests" not in only
    whole = json.loads(json.dumps(serve_report.as_object(made, with_requests=True), allow_nan=False))
    first, second = whole["runs"][0]["requests"]
    assert (first["arrivals_s"], first["ttft_s"]) == ([0.1, 0.2], 0.1)
    assert (second["failure"]["code"], second["ttft_s"]) == ("X", None)


def test_a_trace_that_comes_all_at_once_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    rows = (TraceRow(0.0, 8, 4, None), TraceRow(0.0, 8, 4, None))
    workload = trace_workload(Trace("made.csv", rows), vocab_size=100)
    records = (record([0.1]), record([0.2]))
    made = report(RunResult(workload, records, summarize(records), None, 0.0))
    told = json.loads(json.dumps(serve_report.as_object(made), allow_nan=False))["runs"][0]["workload"]
    assert (told["rate"], told["time_factor"], told["scaling"]["trace_rate"]) == (None, None, None)
    assert "made.csv: 2 requests, all at once\n" in shown(made, capsys)
