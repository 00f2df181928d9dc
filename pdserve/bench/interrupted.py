"""A script that starts a cluster and is interrupted: the cluster ends, and nobody reads a traceback."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType

INTERRUPTED = 130


def tidily(main: Callable[[], int | None]) -> int:
    """What `main` returns. SIGTERM is as Ctrl-C: it ends what it started, and the answer is 130.

    Also where a script is started in the background by a shell, which has it ignore SIGINT.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return main() or 0
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
