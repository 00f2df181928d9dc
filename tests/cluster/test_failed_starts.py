"""A cluster that does not come up says why, and nothing of it is left."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.nodes.processes import is_running
from tests.cluster.commands import Commands, free_port, write_config
from tests.integrity import wait_until
from tests.models import tiny_model

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200)]


def test_a_bad_file_starts_nothing(commands: Commands) -> None:
    path = write_config(commands.home, "bad", free_port(), more="pols: {}\n")
    assert f'{path}:7: pols: unknown key; did you mean "pools"?' in commands.fail("up", str(path))
    assert commands.record("bad") is None


def _no_tokenizer(root: Path) -> tuple[Path, str]:
    model = tiny_model(root)
    (model / "tokenizer.json").unlink()
    return model, f"the folder {model} has no tokenizer.json"


def _cut_short(root: Path) -> tuple[Path, str]:
    model = tiny_model(root)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return model, f"{weights} has "


def _no_gguf(root: Path) -> tuple[Path, str]:
    root.mkdir()
    path = root / "broken.gguf"
    path.write_bytes(b"GGUF and no more")
    return path, f"{path} is cut short, or no GGUF file"


def _not_there(root: Path) -> tuple[Path, str]:
    return root / "none.gguf", f"there is no file {root / 'none.gguf'}"


def _not_served(root: Path) -> tuple[Path, str]:
    model = tiny_model(root, "bloom")
    return model, "cannot start: bloom: layers [0, 1] do not call the attention interface"


def _wrong_shapes(root: Path) -> tuple[Path, str]:
    model = tiny_model(root)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "hidden_size": 48}))
    return model, "-0 cannot start: llama in "


@pytest.mark.parametrize(
    "make",
    [
        _no_tokenizer,
        pytest.param(_cut_short, marks=pytest.mark.full),
        pytest.param(_no_gguf, marks=pytest.mark.full),
        _not_there,
        pytest.param(_not_served, marks=pytest.mark.full),
        pytest.param(_wrong_shapes, marks=pytest.mark.full),
    ],
)
def test_a_model_that_cannot_be_served_ends_up_in_its_own_words(
    commands: Commands, make: Callable[[Path], tuple[Path, str]]
) -> None:
    model, words = make(commands.home / "model")
    path = write_config(commands.home, "broken", free_port(), model=str(model))
    assert words in commands.fail("up", str(path))
    assert commands.record("broken") is None


@pytest.mark.parametrize(
    "number",  # shells' codes: 130 and 143
    [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)],
)
def test_an_interrupted_up_leaves_nothing(commands: Commands, number: signal.Signals) -> None:
    path = write_config(commands.home, "cut", free_port())
    process = commands.start("up", str(path))
    try:
        _read_until(process, "loading libraries")
        process.send_signal(number)
        _read_until(process, "interrupted: ending what was started")
        process.send_signal(number)
        _, told = process.communicate(timeout=60)
        assert process.returncode == 128 + number
        assert "still ending" in told
        assert "Traceback" not in told
    finally:
        process.kill()
        process.communicate()
    assert not (commands.home / "pdserve" / "cut").exists()


@pytest.mark.full
def test_down_cleans_up_after_an_up_that_was_killed(commands: Commands) -> None:
    path = write_config(commands.home, "killed", free_port())
    process = commands.start("up", str(path))
    try:
        _read_until(process, "loading libraries")
    finally:
        process.kill()
        process.communicate()
    ending = _down_in_the_middle(commands, "killed")
    ending.send_signal(signal.SIGINT)
    said, told = ending.communicate(timeout=60)
    assert "still ending" in told
    assert (ending.returncode, said) == (0, "killed is down\n")


@pytest.mark.full
def test_what_a_down_that_was_stopped_leaves_the_next_one_ends(commands: Commands) -> None:
    path = write_config(commands.home, "half", free_port())
    assert commands.run("up", str(path)).returncode == 0
    ending = _down_in_the_middle(commands, "half")
    try:
        for answer in ("twice more", "once more"):
            ending.send_signal(signal.SIGINT)
            _read_until(ending, answer)
        ending.send_signal(signal.SIGINT)
        _, told = ending.communicate(timeout=60)
    finally:
        ending.kill()
    assert ending.returncode == 130
    assert "this ends the rest: pdserve down half" in told
    assert "half is down" in commands.succeed("down", "half")


def _down_in_the_middle(commands: Commands, name: str) -> subprocess.Popen[str]:
    """It has begun to end processes, and others are left."""
    before = commands.processes(name)
    ending = commands.start("down", name)
    assert wait_until(lambda: not all(map(is_running, before)), timeout_s=60)
    return ending


def _read_until(process: subprocess.Popen[str], words: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if words in line:
            return
    raise AssertionError(f"it never said {words!r}")
