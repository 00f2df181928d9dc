"""`pdserve demo` gets out of the way of what is there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster.config_file import parse_config
from cluster.nodes.processes import ProcessId
from cluster.state import ClusterRecord, write_record
from pdserve.cli.demo import _own_config


def own_name() -> str:
    return _own_config(parse_config("name: x\npools: {colocated: {}}\n", "f")).name


def test_a_demo_of_another_machine_with_the_same_home_is_let_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a name that nobody gave, nobody can be asked to give another one."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert own_name() == "demo"
    leader = ProcessId.of(os.getppid())
    here = ClusterRecord(name="demo", router="127.0.0.1:1", ray_folder=tmp_path)
    gone = leader.model_copy(update={"boot": "another"})
    for session, host, name in (
        (leader, here.host, f"demo-{os.getpid()}"),  # runs here
        (gone, here.host, "demo"),  # ran here, before the machine booted
        (gone, "there", f"demo-{os.getpid()}"),
    ):
        parts = {"session": session, "processes": (session,), "host": host}
        write_record(here.model_copy(update=parts))
        assert own_name() == name
