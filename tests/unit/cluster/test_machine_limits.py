"""What a container or a service may use counts, not what its host has."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from cluster.nodes import machine

GIB = 2**30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """/sys/fs/cgroup; without any limit yet."""
    monkeypatch.setattr(machine, "_GROUPS", tmp_path / "cgroup")
    be_in(tmp_path, "0::/")
    monkeypatch.setattr(machine, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    return tmp_path


def be_in(folder: Path, *lines: str) -> None:
    (folder / "own").write_text("".join(f"{line}\n" for line in lines))


def limit(folder: Path, name: str, text: str) -> None:
    path = folder / "cgroup" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def test_without_limits_it_is_all_that_there_is(groups: Path) -> None:
    assert machine.memory_bytes() == psutil.virtual_memory().total
    assert machine.num_cores() == 64
    limit(groups, "memory.max", "max")
    limit(groups, "cpu.max", "max 100000")
    assert machine.memory_bytes() == psutil.virtual_memory().total
    assert machine.num_cores() == 64
    (groups / "own").unlink()
    assert machine.memory_bytes() == psutil.virtual_memory().total


def test_a_container_has_what_its_group_has(groups: Path) -> None:
    limit(groups, "memory.max", str(GIB))
    limit(groups, "cpu.max", "150000 100000")
    assert machine.memory_bytes() == GIB
    assert machine.num_cores() == 2


def test_the_tightest_of_the_groups_around_binds(groups: Path) -> None:
    be_in(groups, "0::/user.slice/a.scope")
    limit(groups, "user.slice/memory.max", str(GIB))
    limit(groups, "user.slice/a.scope/memory.max", str(2 * GIB))
    assert machine.memory_bytes() == GIB


@pytest.mark.parametrize("own", ["docker/abc", ""])
def test_a_group_of_the_first_version_counts_too(groups: Path, own: str) -> None:
    """Inside the container its folder is the outermost, whatever the host calls it."""
    be_in(groups, "9:name=systemd:/", "4:cpu,memory:/docker/abc", "0::/")
    limit(groups, f"memory/{own}/memory.limit_in_bytes", str(GIB))
    limit(groups, "memory/memory.limit_in_bytes" if own else "memory/x", "9223372036854771712")
    assert machine.memory_bytes() == GIB
