"""A cluster in a Ray that was there before: `down` takes away what is ours, and nothing else."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.local_ray import RayHead, make_folder, ray_environment, remove_folder, start_local_ray
from cluster.processes import ProcessId, end
from tests.cluster.commands import Commands, free_port, write_config
from tests.models import tiny_model

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200)]


@pytest.fixture
def running_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayHead]:
    folder = make_folder()
    for name, value in ray_environment(folder).items():
        monkeypatch.setenv(name, value)
    sessions: list[ProcessId] = []
    try:
        head = start_local_ray(folder, 8, 60.0, sessions.append)
        yield head
        end(head.processes, sessions[0])
    finally:
        remove_folder(folder)


def test_down_leaves_a_foreign_ray_alone(tmp_path: Path, running_ray: RayHead) -> None:
    commands = Commands(tmp_path)
    model = tiny_model(tmp_path / "model")
    more = f"ray: {{address: '{running_ray.address}'}}\n"
    path = write_config(tmp_path, "guest", free_port(), model=str(model), more=more)
    commands.succeed("up", str(path))
    assert commands.succeed("generate", "hello", "--max-tokens", "4", "--json")
    status = json.loads(commands.succeed("status", "--json"))
    pids = [worker["pid"] for pool in status["pools"].values() for worker in pool["workers"]]
    assert "guest is down" in commands.succeed("down")
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert all(process.find() is not None for process in running_ray.processes)


def test_a_foreign_ray_that_is_gone_does_not_keep_its_clusters_alive(
    tmp_path: Path, running_ray: RayHead
) -> None:
    commands = Commands(tmp_path)
    more = f"ray: {{address: '{running_ray.address}'}}\n"
    model = tiny_model(tmp_path / "model")
    path = write_config(tmp_path, "orphan", free_port(), model=str(model), more=more)
    commands.succeed("up", str(path))
    for process in running_ray.processes:
        os.kill(process.pid, signal.SIGKILL)
    assert "orphan is down" in commands.succeed("down", "orphan")


def test_a_ray_that_nobody_serves_is_told_at_once(tmp_path: Path) -> None:
    commands = Commands(tmp_path)
    model = tiny_model(tmp_path / "model")
    address = f"127.0.0.1:{free_port()}"
    more = f"ray: {{address: '{address}'}}\n"
    path = write_config(tmp_path, "alone", free_port(), model=str(model), more=more)
    assert f"Ray at {address} cannot be reached" in commands.fail("up", str(path))
    assert commands.record("alone") is None
