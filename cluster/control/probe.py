"""Asking workers how they are, over the same gRPC that routers use."""

from __future__ import annotations

import asyncio

import grpc

from pdserve.v1.cluster_pb2 import WorkerStatus
from pdserve.v1.errors import Unavailable
from pdserve.v1.worker_pb2 import DescribeRequest
from pdserve.v1.worker_pb2_grpc import WorkerStub
from router.fleet.parsed import parsed
from trust.channels import open_aio_channel
from trust.trust import Trust


class Probe:
    """One channel to one worker."""

    def __init__(self, address: str, trust: Trust) -> None:
        self._channel = open_aio_channel(address, trust)
        self._stub = WorkerStub(self._channel)
        self._is_closed = False

    async def describe(self, timeout_s: float) -> WorkerStatus | None:
        """None: no answer in time, bytes that are no message, or closed meanwhile."""
        try:
            answer = parsed(await self._stub.Describe(DescribeRequest(), timeout=timeout_s))
        except (grpc.aio.AioRpcError, Unavailable):
            return None
        except asyncio.CancelledError:
            # Closing a channel cancels its calls, and would so cancel whoever waits for one.
            if self._is_closed:
                return None
            raise
        return answer.status

    async def close(self) -> None:
        self._is_closed = True
        await self._channel.close(None)
