"""`pdserve bench engine` as it is typed, on a tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner, Result

from pdserve.bench.errors import BenchError
from pdserve.cli.app import app
from tests.integrity import wait_until
from tests.models import tiny_model
from tests.processes import command_of
from tests.unit.bench.fake_vllm import fake_interpreter

REAL_VLLM = os.environ.get("PDSERVE_TEST_VLLM_PYTHON")
ROW_KEYS = {"name", "tok_s", "limit_share", "vllm_tok_s", "ratio"}
COMMAND = (sys.executable, "-m", "pdserve.cli.main", "bench", "engine")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def _cores_given_back() -> Iterator[None]:
    """The command holds its process to some cores: here that is everybody's."""
    cores = os.sched_getaffinity(0)
    yield
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cores)
        except ProcessLookupError:
            pass


def bench(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "engine", "--model", str(folder), *arguments])


def test_json_has_the_rows_and_what_they_were_measured_against(folder: Path) -> None:
    done = bench(folder, "--rows", "decode_b8,prefill_128", "--rounds", "1", "--compile", "off", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert [row["name"] for row in told["rows"]] == ["prefill_128", "decode_b8"]
    for row in told["rows"]:
        assert set(row) == ROW_KEYS
        assert row["tok_s"] > 0
        assert 0 < row["limit_share"] < 1
        assert (row["vllm_tok_s"], row["ratio"]) == (None, None)
    assert told["machine"]["matrix_gflop_s"] > 0
    assert told["machine"]["memory_gb_s"] > 0
    assert len(told["machine"]["cores"]) == 1
    assert (told["settings"]["dtype"], told["settings"]["compiled"]) == ("float32", False)
    assert told["vllm"] is None
    assert told["speculation"] == []


def test_with_another_interpreter_every_row_has_a_ratio(folder: Path, tmp_path: Path) -> None:
    python = str(fake_interpreter(tmp_path))
    rows = ("--rows", "prefill_128,decode_b1", "--rounds", "2")
    done = bench(folder, *rows, "--vllm-python", python, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    for row in told["rows"]:
        assert row["ratio"] == pytest.approx(row["tok_s"] / row["vllm_tok_s"], rel=0.01, abs=1e-3)
    assert told["vllm"]["version"] == "0.0.fake"
    shown = bench(folder, *rows, "--vllm-python", python)
    assert shown.exit_code == 0, shown.output
    assert "vLLM 0.0.fake 77" in " ".join(shown.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--rows", "decode_b9"], "there is no row 'decode_b9'; there are prefill_128"),
        (["--threads", "0"], "--threads"),
        (["--dtype", "int4"], "--dtype"),
        (["--compile", "perhaps"], "--compile"),
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
        (
            [],
            r"not all rows fit in the model's context of 2048 tokens; these do: --rows prefill_128,.*_c512$",
        ),
        (["--rows", "prefill_4096"], "context of 2048 tokens; none of them does"),
        (["--threads", "100000"], "100000 threads want as many cores, this process may use"),
        (["--rows", "decode_b1", "--model", "./nowhere"], "there is no folder nowhere"),
    ],
)
def test_what_cannot_be_measured_is_told(folder: Path, arguments: list[str], told: str) -> None:
    error = bench(folder, *arguments).exception
    assert isinstance(error, BenchError)
    with pytest.raises(BenchError, match=told):
        raise error


@pytest.mark.timeout(240)
def test_ctrl_c_ends_the_other_engine_too(folder: Path, tmp_path: Path) -> None:
    python = fake_interpreter(tmp_path, "hang")
    process = subprocess.Popen(
        [*COMMAND, "--model", str(folder), "--rows", "decode_b1", "--vllm-python", str(python)],
        stderr=subprocess.PIPE,
        text=True,
    )
    children: list[psutil.Process] = []

    def is_asking() -> bool:
        children[:] = psutil.Process(process.pid).children()
        return any("vllm_script" in command_of(child) for child in children)

    try:
        assert wait_until(is_asking, timeout_s=100)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "interrupted" in said
    assert "Traceback" not in said
    assert wait_until(lambda: not any(map(command_of, children)), timeout_s=30)


@pytest.mark.skipif(REAL_VLLM is None, reason="PDSERVE_TEST_VLLM_PYTHON names no interpreter with vLLM")
@pytest.mark.timeout(900)
def test_the_real_vllm_runs_the_same_rows(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, head_dim=64)  # its attention takes no smaller heads
    rows = ("--rows", "prefill_128,decode_b8", "--rounds", "1")
    done = bench(folder, *rows, "--vllm-python", str(REAL_VLLM), "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert [row["vllm_tok_s"] > 0 for row in told["rows"]] == [True, True]
    assert told["vllm"]["idle_load"] < 0.05
