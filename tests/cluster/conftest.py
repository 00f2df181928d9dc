"""What several files here start from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.nodes.local_ray import RayHead, make_folder, ray_environment, remove_folder, start_local_ray
from cluster.nodes.processes import ProcessId, end
from tests.cluster.commands import Commands, leftovers, temp_folders


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    """After the test there is no folder of a Ray and no process that was not there before."""
    before = temp_folders()
    commands = Commands(tmp_path)
    try:
        yield commands
        assert temp_folders() == before
        assert leftovers(tmp_path) == []
    finally:
        for folder in (tmp_path / "pdserve").glob("*"):
            commands.run("down", folder.name)


@pytest.fixture
def running_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayHead]:
    """A Ray that is not pdserve's to end."""
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
