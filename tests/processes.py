"""Looking at processes that may end at any moment."""

from __future__ import annotations

import psutil


def command_of(process: psutil.Process) -> str:
    """Nothing for one that has ended, a zombie included."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
