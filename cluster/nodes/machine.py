"""What this process may use of the machine: less than there is in a container or a service with limits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def memory_bytes() -> int:
    limits = _settings("memory", "memory.max", "memory.limit_in_bytes")
    return min([psutil.virtual_memory().total, *(int(text) for text in limits if text != "max")])


def num_cores() -> int:
    """A share of a core counts as one."""
    num_allowed = len(os.sched_getaffinity(0))
    quotas = [text.split() for text in _settings("cpu", "cpu.max", None)]
    shares = [-(-int(quota) // int(period)) for quota, period in quotas if quota != "max"]
    return min([num_allowed, *shares])


def _settings(controller: str, name: str, name_v1: str | None) -> Iterator[str]:
    """Of this process's control group and those around it, which bind it as well. Inside a container they may
    be told by names of the outside: then only the outermost folder is there, and it is the container's own.
    """
    try:
        lines = _OWN_GROUPS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            folder, file = _GROUPS, name
        elif name_v1 is not None and controller in controllers.split(","):
            folder, file = _GROUPS / controller, name_v1
        else:
            continue
        for part in ("", *path.strip("/").split("/")):
            folder /= part
            try:
                yield (folder / file).read_text(encoding="ascii").strip()
            except OSError:
                continue
