"""One snapshot for all pages that are open: the controller asks every worker whenever it is asked."""

from __future__ import annotations

import asyncio
import time

from pdserve.v1 import cluster_pb2
from router.router import Router

# How old a snapshot may be.
_FRESH_S = 0.5


class Snapshots:
    def __init__(self, router: Router) -> None:
        self._router = router
        self._asking = asyncio.Lock()
        self._last: cluster_pb2.ClusterSnapshot | None = None
        self._read_at = 0.0

    async def read(self) -> cluster_pb2.ClusterSnapshot:
        """Raises PdserveError where the controller does not answer."""
        async with self._asking:
            if self._last is None or time.monotonic() - self._read_at > _FRESH_S:
                self._last = None
                message = cluster_pb2.GetClusterRequest()
                self._last = await self._router.ask_controller(lambda to: to.GetCluster, message)
                self._read_at = time.monotonic()
            return self._last
