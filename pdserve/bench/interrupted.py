"""A script that starts a cluster and is interrupted: the cluster ends, and nobody reads a traceback."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType

INTERRUPTED = 130


def tidily(main: Callable[[], int | None]) -> int:
    """What `main` returns; 130 where it was interrupted."""
    hear_sigterm()
    try:
        return main() or 0
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED


def hear_sigterm() -> None:
    """From now on SIGTERM is as Ctrl-C, which a script in a shell's background does not hear."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
