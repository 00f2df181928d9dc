"""The folder in which a user's processes keep what takes long to make: converted models, compiled kernels."""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

_ROOT_USER = 0
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_root() -> Path:
    """In a home that is missing or cannot be written nothing can be kept: then it is a folder for this user
    in the temporary one. Raises OSError where that is somebody else's.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "pdserve"
    kept = _home_cache()
    if kept is not None:
        return kept / "pdserve"
    folder = Path(tempfile.gettempdir()) / f"pdserve-{os.geteuid()}"
    make_private(folder)
    check_private(folder)
    log.info("there is no home folder to keep a cache in: it is in %s", folder)
    return folder


def make_private(folder: Path) -> None:
    """For our eyes only, unless it is there already."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def check_private(*paths: Path) -> None:
    """PermissionError if anybody but this user and root may have written one of them; those that are not
    there are passed over.
    """
    for path in paths:
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        mine = "set XDG_CACHE_HOME to a folder of your own"
        if status.st_uid not in (os.geteuid(), _ROOT_USER):
            raise PermissionError(f"{path} belongs to user {status.st_uid}: delete it, or {mine}")
        if status.st_mode & _WRITABLE_BY_OTHERS:
            raise PermissionError(f"{path} can be written by others: delete it, or {mine}")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time; the kernel lets go of the lock if its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _home_cache() -> Path | None:
    try:
        home = Path.home()
    except RuntimeError:  # no HOME, and a user that the system does not know
        return None
    kept = home / ".cache"
    return kept if os.path.isdir(kept) or os.access(home, os.W_OK) else None
