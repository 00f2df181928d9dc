"""Clusters with different names side by side: in a Ray of their own, and two in one that was there before."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from cluster.nodes.local_ray import RayHead
from cluster.nodes.processes import is_running
from tests.cluster.commands import Commands, free_port
from tests.models import tiny_model

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(240)]


def write_config(commands: Commands, name: str, model: Path, port: int, ray: str = "local") -> str:
    path = commands.home / f"{name}.yaml"
    path.write_text(
        f"""\
name: {name}
model: {{id: "{model}"}}
router: {{grpc: "127.0.0.1:{port}"}}
pools: {{colocated: {{engine: {{num_blocks: 64}}}}}}
ray: {{address: "{ray}"}}
"""
    )
    return str(path)


def generated(commands: Commands, name: str) -> list[int]:
    answer = commands.succeed("generate", "hello", "--name", name, "--max-tokens", "4", "--json")
    token_ids: list[int] = json.loads(answer)["token_ids"]
    return token_ids


def worker_pid(commands: Commands, name: str) -> int:
    status = json.loads(commands.succeed("status", "--name", name, "--json"))
    return int(status["pools"]["colocated"]["workers"][0]["pid"])


def test_each_cluster_is_ended_alone(commands: Commands, running_ray: RayHead) -> None:
    model = tiny_model(commands.home / "model")
    ports = {name: free_port() for name in ("own", "guest", "guest-2")}
    rays = {"own": "local", "guest": running_ray.address, "guest-2": running_ray.address}
    paths = {name: write_config(commands, name, model, ports[name], rays[name]) for name in ports}
    for path in paths.values():
        commands.succeed("up", path)
    answers = [generated(commands, name) for name in ports]
    assert answers[0] == answers[1] == answers[2]
    pids = {name: worker_pid(commands, name) for name in ports}

    # What is not clear or there already is refused, and changes nothing.
    several = "several clusters run (guest, guest-2, own)"
    assert several in commands.fail("down")
    assert several in commands.fail("generate", "hello")
    all_of_them = json.loads(commands.succeed("status", "--json"))["clusters"]
    assert [each["name"] for each in all_of_them] == sorted(ports)
    for name in ("own", "guest"):
        assert f'the cluster "{name}" runs already' in commands.fail("up", paths[name])
    late = write_config(commands, "late", model, ports["guest"])
    assert f"router.grpc: 127.0.0.1:{ports['guest']} cannot be used" in commands.fail("up", late)
    assert commands.record("late") is None
    assert not (commands.home / "pdserve" / "late").exists()
    told = 'there never was a cluster "nobody" here; these run: guest, guest-2, own'
    assert told in commands.fail("down", "nobody")

    assert "guest is down" in commands.succeed("down", "guest")
    _assert_gone(pids["guest"])
    assert generated(commands, "guest-2") == generated(commands, "own") == answers[0]

    own = commands.processes("own")
    assert "own is down" in commands.succeed("down", "own")
    assert [process for process in own if is_running(process)] == []
    assert generated(commands, "guest-2") == answers[0]

    assert "guest-2 is down" in commands.succeed("down")
    _assert_gone(pids["guest-2"])
    for name in ports:
        assert f'the cluster "{name}" is down already' in commands.succeed("down", name)
    assert all(process.find() is not None for process in running_ray.processes)


def _assert_gone(pid: int) -> None:
    if psutil.pid_exists(pid):
        psutil.Process(pid).wait(5)
