"""Noticing that files were changed, at the price of a `stat` a second."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

_LOOK_EVERY_S = 1.0


class Changes:
    """Used by one thread."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._seen = self._look()
        self._looked_at = time.monotonic()

    def have_come(self) -> bool:
        """Since this was asked last."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_EVERY_S:
            return False
        self._looked_at = now
        before, self._seen = self._seen, self._look()
        return before != self._seen

    def _look(self) -> list[tuple[int, int, int] | None]:
        return [_mark(path) for path in self._paths]


def _mark(path: Path) -> tuple[int, int, int] | None:
    """None: it is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
