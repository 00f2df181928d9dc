"""Generations in flight over gRPC. A router that stops ends what is left with a status of its own: one that
its server cancels would tell the client nothing but that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pdserve.v1.errors import Unavailable
from router.interruption import Interruption


def stopping() -> Unavailable:
    return Unavailable("the router stops", reason="STOPPING")


class Calls:
    """Each call's work, while it is inside `one`."""

    def __init__(self) -> None:
        self._open: set[Interruption] = set()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Around a call's work: raises Unavailable once `end` was called."""
        with Interruption() as work:
            self._open.add(work)
            try:
                yield
            finally:
                self._open.discard(work)

    def end(self) -> None:
        for work in tuple(self._open):
            work.end(stopping())
