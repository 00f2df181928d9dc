"""Processes that we started: known by pid and start time, so that a reused pid is never taken for ours."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class ProcessId(BaseModel):
    """One process for all time, whatever the clock is set to meanwhile."""

    model_config = ConfigDict(frozen=True)

    pid: int
    started: int  # clock ticks since the machine's boot
    boot: str  # which boot that was
    what: str = ""

    @classmethod
    def of(cls, pid: int, what: str = "") -> ProcessId:
        """Raises psutil.NoSuchProcess."""
        return cls(pid=pid, started=_start_ticks(pid), boot=_boot(), what=what)

    @property
    def is_of_this_boot(self) -> bool:
        """Else it is of another machine, or ended long ago."""
        return self.boot == _boot()

    def find(self) -> psutil.Process | None:
        """The running process, if it is still this one."""
        try:
            process = psutil.Process(self.pid)
            is_this = _start_ticks(self.pid) == self.started and self.is_of_this_boot
        except psutil.NoSuchProcess:
            return None
        return process if is_this and is_running(process) else None


def _start_ticks(pid: int) -> int:
    """Raises psutil.NoSuchProcess."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError as error:  # gone, or another user's where those are hidden
        raise psutil.NoSuchProcess(pid) from error
    # The 22nd field. The second is the name in parentheses, which may hold spaces and parentheses too.
    return int(stat.rpartition(b")")[2].split()[19])


def _boot() -> str:
    """Empty where the kernel does not tell."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def is_running(process: psutil.Process) -> bool:
    """A dead child that nobody has waited for does not run."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def family(roots: Iterable[ProcessId], session: ProcessId | None) -> list[psutil.Process]:
    """What runs of the roots, of everything below them, and of the Unix session that `session` led.

    The session finds what lost its parent: a worker's children after its SIGKILL. Its number can belong
    to somebody else only once all of ours have ended, and then either its leader runs under the same pid
    with another start time, or its members are older than ours.
    """
    found: dict[int, psutil.Process] = {}
    members = _session_members(session) if session is not None else []
    for process in [*filter(None, (root.find() for root in roots)), *members]:
        try:
            for each in (process, *process.children(recursive=True)):
                if is_running(each):
                    found[each.pid] = each
        except psutil.NoSuchProcess:
            continue
    found.pop(os.getpid(), None)
    return list(found.values())


def _session_members(session: ProcessId) -> list[psutil.Process]:
    if not session.is_of_this_boot:
        return []
    if psutil.pid_exists(session.pid) and session.find() is None:
        leader = psutil.Process(session.pid)
        if leader.status() != psutil.STATUS_ZOMBIE:
            return []
    members = []
    for process in psutil.process_iter():
        try:
            is_member = os.getsid(process.pid) == session.pid and process.uids().real == os.getuid()
            if is_member and _start_ticks(process.pid) >= session.started:
                members.append(process)
        except (psutil.Error, OSError):
            continue  # ended meanwhile, or not ours to look at
    return members


def end(roots: Iterable[ProcessId], session: ProcessId | None, grace_s: float = 3.0) -> list[psutil.Process]:
    """SIGTERM, then SIGKILL, until nothing of the family is left. Returns what would not go."""
    roots = list(roots)
    left = family(roots, session)
    _signal(left, signal.SIGTERM)
    _, left = psutil.wait_procs(left, timeout=grace_s)
    # Anew each time: one that was just being started was not in the first list.
    for _ in range(5):
        left = list({each.pid: each for each in (*left, *family(roots, session))}.values())
        left = [process for process in left if is_running(process)]
        if not left:
            break
        _signal(left, signal.SIGKILL)
        psutil.wait_procs(left, timeout=1.0)
    return left


def _signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue
