"""The record of a running cluster: found by name or alone, and never believed when its processes are gone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cluster.ending import down
from cluster.errors import StateError
from cluster.nodes.processes import ProcessId
from cluster.state import (
    ClusterRecord,
    clear_folder,
    cluster_folder,
    find_cluster,
    forget,
    fresh_folder,
    locked,
    read_record,
    running_clusters,
    write_record,
)


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def record(name: str, pid: int) -> ClusterRecord:
    return ClusterRecord(
        name=name,
        router="127.0.0.1:50051",
        ray_folder=Path("/tmp/none"),
        processes=(ProcessId.of(pid, "raylet"),),
    )


def test_a_record_is_read_as_it_was_written() -> None:
    written = record("a", os.getppid())
    write_record(written)
    assert read_record("a") == written
    assert cluster_folder("a").stat().st_mode & 0o777 == 0o700


def test_the_only_cluster_needs_no_name() -> None:
    with pytest.raises(StateError, match="no cluster runs here"):
        find_cluster(None)
    write_record(record("a", os.getppid()))
    assert find_cluster(None).name == "a"
    write_record(record("b", os.getppid()))
    with pytest.raises(StateError, match=r"several clusters run \(a, b\)"):
        find_cluster(None)
    assert find_cluster("b").name == "b"
    with pytest.raises(StateError, match='no cluster "c" runs here; these do: a, b'):
        find_cluster("c")
    forget("a")
    assert find_cluster(None).name == "b"


def test_a_record_of_processes_that_are_gone_is_no_running_cluster() -> None:
    gone = record("a", os.getppid())
    first = gone.processes[0].model_copy(update={"started": gone.processes[0].started - 1000})
    write_record(gone.model_copy(update={"processes": (first,)}))
    assert running_clusters() == []


def test_a_cluster_of_a_machine_with_the_same_home_is_let_be(state_home: Path) -> None:
    leader = ProcessId.of(os.getppid()).model_copy(update={"boot": "another"})
    there = record("a", os.getppid()).model_copy(update={"session": leader, "host": "there"})
    write_record(there)
    told = f"was started on there, .*: end it there, .*: rm -r {state_home}/pdserve/a"
    with pytest.raises(StateError, match=told):
        down(there, print)
    assert read_record("a") == there


def test_a_cluster_of_before_this_machine_booted_is_forgotten(state_home: Path) -> None:
    leader = ProcessId.of(os.getppid()).model_copy(update={"boot": "another"})
    before = record("a", os.getppid()).model_copy(update={"session": leader, "processes": ()})
    write_record(before)
    assert running_clusters() == []
    down(before, print)
    assert read_record("a") is None


def test_a_record_of_another_version_is_told_with_the_way_out(state_home: Path) -> None:
    """Such as one whose processes are known by other marks."""
    written = json.loads(record("a", os.getppid()).model_dump_json())
    written["processes"][0] = {"pid": os.getppid(), "started": 1764499200.25}
    (cluster_folder("a") / "cluster.json").write_text(json.dumps(written))
    told = f"damaged, or of another version of pdserve.*rm -r {state_home}/pdserve/a"
    for asked in (lambda: read_record("a"), running_clusters):
        with pytest.raises(StateError, match=told):
            asked()
    # It is in nobody else's way.
    write_record(record("b", os.getppid()))
    assert [each.name for each in running_clusters()] == ["b"]
    assert find_cluster(None).name == find_cluster("b").name == "b"
    with pytest.raises(StateError, match='no cluster "c" runs here; these do: b'):
        find_cluster("c")
    with pytest.raises(StateError, match=told):
        find_cluster("a")


def test_one_command_at_a_time_works_on_a_cluster() -> None:
    with locked("a"), pytest.raises(StateError, match="just starting or ending"), locked("a"):
        pass
    with locked("a"):
        pass


def test_a_folder_with_nothing_but_its_lock_goes_with_the_lock() -> None:
    with locked("a") as folder:
        fresh_folder(folder)
        assert (folder / "logs").is_dir()
        assert not clear_folder(folder, keep_logs=True)
    assert not folder.exists()


def test_logs_that_say_something_are_kept_if_they_shall_be() -> None:
    for keep_logs in (True, False):
        with locked("a") as folder:
            fresh_folder(folder)
            (folder / "targets.json").touch()
            (folder / "logs" / "controller.log").write_text("why")
            assert clear_folder(folder, keep_logs) == keep_logs
        assert [path.name for path in folder.glob("*.json")] == []
        assert folder.exists() == keep_logs


def test_without_a_home_the_state_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", nobody)
    with pytest.raises(StateError, match="set XDG_STATE_HOME"):
        cluster_folder("a")
