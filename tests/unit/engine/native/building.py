"""Builds that tests watch; a process of its own imports no more than it needs."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path

from engine.native.build import COMPILING, build_library

# Puts a script in the compiler's place.
Install = Callable[[str], None]
WORKING = 'exec /usr/bin/g++ "$@"'


def build(sources: Path) -> tuple[Path, bool]:
    """The library, and whether it had to be compiled."""
    told: list[str] = []
    path = build_library(told.append, sources)
    return path, COMPILING in told


def build_in_process(sources: Path, ready: multiprocessing.Barrier, results: multiprocessing.Queue) -> None:
    ready.wait()
    results.put(build(sources))
