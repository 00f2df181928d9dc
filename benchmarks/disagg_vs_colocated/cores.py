"""Who runs where."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def confined(cores: Sequence[int]) -> Iterator[None]:
    """What is started in here stays on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def leave(cores: Sequence[int]) -> None:
    """This process goes where they are not, if there is such a place."""
    os.sched_setaffinity(0, os.sched_getaffinity(0) - set(cores) or cores)
