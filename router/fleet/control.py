"""Asks the controller, and watches it.

A watch that breaks is opened again; until then the last snapshot stays good.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import grpc
from google.protobuf.message import Message

from pdserve.v1 import cluster_pb2, cluster_pb2_grpc
from pdserve.v1.errors import DeadlineExceeded, Unavailable, from_rpc_error
from router.fleet.workers import WorkerTable
from router.loss import back_off_s

logger = logging.getLogger(__name__)

# The controller answers each call at once.
_TIMEOUT_S = 10.0

CHANNEL_OPTIONS = (
    # http_proxy in the environment is for the world outside.
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
)


async def ask(
    method: Callable[..., Awaitable[cluster_pb2.ClusterSnapshot]], message: Message
) -> cluster_pb2.ClusterSnapshot:
    """Raises PdserveError."""
    try:
        return await method(message, timeout=_TIMEOUT_S)
    except grpc.aio.AioRpcError as failure:
        error = from_rpc_error(failure)
        if isinstance(error, Unavailable | DeadlineExceeded):
            silence = f"the controller does not answer: {error.message}"
            raise Unavailable(silence, reason="CONTROLLER_LOST") from failure
        raise error from failure


async def watch(control: cluster_pb2_grpc.ControlAsyncStub, router_id: str, table: WorkerTable) -> None:
    """Runs until cancelled."""
    num_failures = 0
    while True:
        try:
            async for snapshot in control.Watch(cluster_pb2.WatchRequest(router_id=router_id)):
                num_failures = 0
                table.apply(snapshot)
            logger.warning("the controller ended its watch")
        except grpc.aio.AioRpcError as error:
            logger.warning("no watch of the controller: %s", error.details())
        num_failures += 1
        await asyncio.sleep(back_off_s(num_failures, base_s=0.1, limit_s=2.0))
