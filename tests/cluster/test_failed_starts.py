"""A cluster that does not come up says why, and nothing of it is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster.commands import Commands, free_port, temp_folders, write_config
from tests.models import tiny_model

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200)]


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    """After the test there is no folder of a Ray and no process that was not there before."""
    before = temp_folders()
    commands = Commands(tmp_path)
    try:
        yield commands
        assert temp_folders() == before
        assert _processes_of(tmp_path) == []
    finally:
        for folder in (tmp_path / "pdserve").glob("*"):
            commands.run("down", folder.name)


def _processes_of(home: Path) -> list[str]:
    """All who were started with this state folder: it is in their environment or in their arguments."""
    found = []
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), process.environ().get("XDG_STATE_HOME", "")]
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if process.pid != os.getpid() and any(str(home) in word for word in words):
            found.append(" ".join(words))
    return found


def test_a_bad_file_starts_nothing(commands: Commands) -> None:
    path = write_config(commands.home, "bad", free_port(), more="pols: {}\n")
    assert f'{path}:7: pols: unknown key; did you mean "pools"?' in commands.fail("up", str(path))
    assert commands.record("bad") is None


def test_a_model_that_is_not_there_is_told(commands: Commands) -> None:
    path = write_config(commands.home, "none", free_port(), model="/no/such/model.gguf")
    assert "/no/such/model.gguf" in commands.fail("up", str(path))


def test_a_model_that_a_worker_cannot_load_is_told_in_its_words(commands: Commands) -> None:
    model = tiny_model(commands.home / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "hidden_size": 48}))
    path = write_config(commands.home, "broken", free_port(), model=str(model))
    told = commands.fail("up", str(path))
    assert "prefill-0 cannot start: " in told or "decode-0 cannot start: " in told


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_up_leaves_nothing(commands: Commands, number: signal.Signals) -> None:
    path = write_config(commands.home, "cut", free_port())
    process = commands.start("up", str(path))
    try:
        _read_until(process, "loading libraries")
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode not in (0, None)
    finally:
        process.kill()
        process.communicate()
    assert commands.record("cut") is None


def test_down_cleans_up_after_an_up_that_was_killed(commands: Commands) -> None:
    path = write_config(commands.home, "killed", free_port())
    process = commands.start("up", str(path))
    try:
        _read_until(process, "loading libraries")
    finally:
        process.kill()
        process.communicate()
    assert commands.processes("killed") != []
    assert "killed is down" in commands.succeed("down", "killed")


def _read_until(process: subprocess.Popen[str], words: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if words in line:
            return
    raise AssertionError(f"it never said {words!r}")
