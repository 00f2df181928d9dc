"""The other engine, in its own interpreter: what is asked of it, and what is told where it cannot answer."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pdserve.bench.errors import VllmError
from pdserve.bench.vllm_process import VllmSettings, running_vllm
from tests.unit.bench.fake_vllm import fake_interpreter


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where logs go; whatever happens, no process is left."""
    folder = tmp_path / "logs"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    yield folder
    assert [each for each in psutil.Process().children() if "vllm_script" in " ".join(each.cmdline())] == []


def settings() -> VllmSettings:
    cores = sorted(os.sched_getaffinity(0))[:1]
    return VllmSettings(Path("a-model"), "float32", 100, 2, 2**20, cores)


def test_it_answers_row_by_row(tmp_path: Path, temporary: Path) -> None:
    with running_vllm(fake_interpreter(tmp_path), settings()) as vllm:
        assert (vllm.version, vllm.max_num_batched_tokens) == ("0.0.fake", 77)
        assert vllm.prefill([1, 2, 3]).num_tokens == 3
        vllm.begin([[1, 2], [3, 4]], num_new_tokens=20)
        for num_steps in (5, 7):
            timed = vllm.decode(num_steps)
            assert timed.num_tokens == 2 * num_steps
            assert timed.seconds > 0
        vllm.end()
        # The places that were taken are free again.
        vllm.begin([[1, 2], [3, 4]], num_new_tokens=20)
        assert vllm.decode(1).num_tokens == 2
        assert vllm.idle_load < 0.5
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("load", r"vLLM in .*/python: it ended with exit code 1: ValueError: a-model is not for this engine"),
        ("step", r"vLLM in .*/python: it ended with exit code 1: RuntimeError: a kernel is missing"),
        ("exit", r"vLLM in .*/python: it ended with exit code 7"),
    ],
)
def test_where_it_fails_its_last_words_are_told_and_its_log_is_kept(
    tmp_path: Path, temporary: Path, wrong: str, told: str
) -> None:
    with (
        pytest.raises(VllmError, match=told) as raised,
        running_vllm(fake_interpreter(tmp_path, wrong), settings()) as vllm,
    ):
        vllm.prefill([1, 2, 3])
    (log,) = temporary.iterdir()
    assert str(log) in str(raised.value)
    assert "what vLLM prints is no answer" in log.read_text()


def test_an_interpreter_without_vllm_is_refused(temporary: Path) -> None:
    with pytest.raises(VllmError, match=f"vLLM in {sys.executable}: it has no vllm"):
        running_vllm(Path(sys.executable), settings()).__enter__()
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (None, "it cannot be run: No such file or directory"),
        ("#!/bin/sh\necho so what\n", "it answered what is no JSON: 'so what'"),
        ("#!/bin/sh\nexit 3\n", "it ended with exit code 3"),
    ],
)
def test_what_is_no_interpreter_is_refused(tmp_path: Path, script: str | None, told: str) -> None:
    path = tmp_path / "python"
    if script is not None:
        path.write_text(script)
        path.chmod(0o755)
    with pytest.raises(VllmError, match=told):
        running_vllm(path, settings()).__enter__()


def test_it_is_ended_with_whoever_asked(tmp_path: Path, temporary: Path) -> None:
    with pytest.raises(KeyboardInterrupt), running_vllm(fake_interpreter(tmp_path), settings()):
        raise KeyboardInterrupt
    assert list(temporary.iterdir()) == []
