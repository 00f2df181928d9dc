"""Only what we started is found and ended, orphans included."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from cluster.nodes.processes import ProcessId, end, family, is_running

# Starts a child that ignores SIGTERM, says its pid, and waits.
PARENT = '''
import subprocess, sys
stubborn = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(flush=True)
time.sleep(60)
"""
child = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
'''


def start_parent() -> tuple[subprocess.Popen[str], psutil.Process]:
    command = [sys.executable, "-c", PARENT]
    parent = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert parent.stdout is not None
    return parent, psutil.Process(int(parent.stdout.readline()))


def close(parent: subprocess.Popen[str]) -> None:
    parent.wait(timeout=10)
    for pipe in (parent.stdin, parent.stdout):
        assert pipe is not None
        pipe.close()


def test_children_end_with_their_parent_even_those_that_ignore_sigterm() -> None:
    parent, child = start_parent()
    root = ProcessId.of(parent.pid)
    assert {process.pid for process in family([root], None)} == {parent.pid, child.pid}
    assert end([root], None, grace_s=0.2) == []
    close(parent)
    assert not is_running(child)


def test_a_child_that_lost_its_parent_is_found_by_its_session() -> None:
    parent, child = start_parent()
    root = ProcessId.of(parent.pid)
    parent.kill()
    close(parent)
    assert family([root], None) == []
    assert [process.pid for process in family([root], root)] == [child.pid]
    assert end([root], root, grace_s=0.2) == []
    assert not is_running(child)


def test_a_pid_that_belongs_to_somebody_else_now_is_left_alone() -> None:
    parent, child = start_parent()
    now = ProcessId.of(parent.pid)
    earlier = now.model_copy(update={"started": now.started - 1})
    assert earlier.find() is None
    assert end([earlier], earlier, grace_s=0.2) == []
    assert is_running(child)
    end([ProcessId.of(parent.pid)], None, grace_s=0.2)
    close(parent)


def test_what_runs_is_found_though_the_clock_was_set_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    parent, child = start_parent()
    root = ProcessId.of(parent.pid)
    # What is left of a session, too.
    parent.kill()
    close(parent)
    orphan = ProcessId.of(child.pid)
    booted = psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: booted - 3600)  # set an hour back
    assert orphan.find() is not None
    assert [process.pid for process in family([root], root)] == [child.pid]
    assert end([root], root, grace_s=0.2) == []
    assert not is_running(child)


def test_a_process_of_before_the_machine_booted_is_no_more() -> None:
    parent, child = start_parent()
    root = ProcessId.of(parent.pid)
    before = root.model_copy(update={"boot": "another"})
    assert before.find() is None
    assert family([before], before) == []
    assert end([root], None, grace_s=0.2) == []
    assert not is_running(child)
    close(parent)
