"""A folder for one Unix socket, which its user alone can enter, and the removal of those whose owner was
killed. Its owner holds a lock on it; the kernel lets go of that with the process."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "pdserve-kv-"
# A Unix socket's path has at most 107 characters; our own part takes 23.
_LONGEST_BASE = 80


class SocketFolder:
    """Raises OSError where there can be none."""

    def __init__(self) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_base()))  # mode 0700
            lock = _locked(self.path)
            if lock is not None:
                self._lock = lock
                return

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_left_overs() -> int:
    """Every such folder of this user that nobody holds; how many there were."""
    num_removed = 0
    for path in Path(_base()).glob(f"{_PREFIX}*"):
        lock = _locked(path)
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
            num_removed += 1
    return num_removed


def _locked(path: Path) -> int | None:
    """A descriptor that holds the folder's lock; None if it is another's, is held, or has just been
    removed by somebody who took it for left over."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(folder).st_uid == os.geteuid():
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(folder), path.stat()):
                return folder
    except OSError:  # somebody holds it, or it is gone
        pass
    os.close(folder)
    return None


def _base() -> str:
    base = tempfile.gettempdir()
    return base if len(base) <= _LONGEST_BASE else "/tmp"
