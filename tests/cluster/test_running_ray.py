"""A Ray that is not there, or not any more. One that is: test_two_clusters and test_two_nodes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from cluster.nodes.local_ray import RayHead
from tests.cluster.commands import Commands, free_port, write_config
from tests.models import tiny_model

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200)]


@pytest.mark.full
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
