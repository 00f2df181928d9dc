"""Several ways into one decode worker, each with an end of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from kv_transfer.transport.base import PushEndpoint
from kv_transfer.ways import Way


class SeveralEndpoints:
    """`endpoints`: the best first."""

    def __init__(self, endpoints: Sequence[PushEndpoint]) -> None:
        self._endpoints = tuple(endpoints)

    @property
    def ways(self) -> tuple[Way, ...]:
        return tuple(way for endpoint in self._endpoints for way in endpoint.ways)

    def start(self) -> None:
        for endpoint in self._endpoints:
            endpoint.start()

    def stop(self) -> None:
        """All of them, whatever becomes of one."""
        with ExitStack() as ending:
            for endpoint in self._endpoints:
                ending.callback(endpoint.stop)
