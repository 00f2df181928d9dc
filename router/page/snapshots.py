"""One snapshot for all pages that are open: the controller asks every worker whenever it is asked."""

from __future__ import annotations

import asyncio
import time

from pdserve.v1 import cluster_pb2
from pdserve.v1.errors import PdserveError
from router.router import Router

# How old a snapshot may be.
_FRESH_S = 0.5


class Snapshots:
    def __init__(self, router: Router) -> None:
        self._router = router
        self._asking = asyncio.Lock()
        self._last: cluster_pb2.ClusterSnapshot | None = None
        self._read_at = 0.0
        self._failure: PdserveError | None = None
        self._failed_at = 0.0

    async def read(self) -> cluster_pb2.ClusterSnapshot:
        """Raises PdserveError where the controller does not answer: to all who waited, after one question."""
        came_at = time.monotonic()
        async with self._asking:
            if self._failure is not None and self._failed_at >= came_at:
                raise self._failure
            if self._last is None or time.monotonic() - self._read_at > _FRESH_S:
                self._last = None
                self._last = await self._ask()
                self._read_at = time.monotonic()
            return self._last

    async def _ask(self) -> cluster_pb2.ClusterSnapshot:
        try:
            return await self._router.ask_controller(
                lambda to: to.GetCluster, cluster_pb2.GetClusterRequest()
            )
        except PdserveError as error:
            self._failure, self._failed_at = error, time.monotonic()
            raise
