"""Asks the controller, and watches it.

A watch that breaks is opened again; until then the last snapshot stays good. A new controller may serve
elsewhere than the one before it: where, is looked up before each watch.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
from google.protobuf.message import Message

from pdserve.v1 import cluster_pb2, cluster_pb2_grpc
from pdserve.v1.errors import DeadlineExceeded, Unavailable, from_rpc_error
from router.fleet.parsed import parsed
from router.fleet.workers import WorkerTable
from router.loss import back_off_s
from trust.channels import open_aio_channel
from trust.trust import Trust

logger = logging.getLogger(__name__)

# The controller answers each call at once …
ANSWER_TIMEOUT_S = 10.0
# … but those that start something.
START_TIMEOUT_S = 60.0

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
)


Answer = Callable[..., Awaitable[cluster_pb2.ClusterSnapshot]]
"""One of Control's methods on a stub."""


class ControlLink:
    """The way to the controller that is there now.

    `file`: where it says by itself where it serves; without one it is at `address`, always.
    """

    def __init__(self, trust: Trust, address: str | None, file: Path | None) -> None:
        self._trust = trust
        self._file = file
        self._address: str | None = None
        self._channel: grpc.aio.Channel | None = None
        self._stub: cluster_pb2_grpc.ControlAsyncStub | None = None
        if address is not None:
            self._open(address)

    async def find(self) -> cluster_pb2_grpc.ControlAsyncStub:
        """Raises Unavailable where nothing says yet where it serves."""
        address = self._address if self._file is None else _address_in(self._file)
        if address is not None and address != self._address:
            before = self._channel
            self._open(address)
            if before is not None:
                # Calls that are still on the way to one that is gone end by themselves.
                await before.close(ANSWER_TIMEOUT_S)
        return self._found()

    async def ask(
        self,
        method: Callable[[cluster_pb2_grpc.ControlAsyncStub], Answer],
        message: Message,
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> cluster_pb2.ClusterSnapshot:
        """Raises PdserveError."""
        try:
            return parsed(await method(self._found())(message, timeout=timeout_s))
        except grpc.aio.AioRpcError as failure:
            error = from_rpc_error(failure)
            # One with a reason of its own is the controller's answer; gRPC's have none.
            is_silent = error.reason == error.default_reason
            if is_silent and isinstance(error, Unavailable | DeadlineExceeded):
                silence = f"the controller does not answer: {error.message}"
                raise Unavailable(silence, reason="CONTROLLER_LOST") from failure
            raise error from failure

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close(None)

    def _found(self) -> cluster_pb2_grpc.ControlAsyncStub:
        if self._stub is None:
            raise Unavailable("the controller has not started yet", reason="CONTROLLER_LOST")
        return self._stub

    def _open(self, address: str) -> None:
        self._address = address
        self._channel = open_aio_channel(address, self._trust, _CHANNEL_OPTIONS)
        self._stub = cluster_pb2_grpc.ControlStub(self._channel)


def _address_in(file: Path) -> str | None:
    try:
        address: str = json.loads(file.read_bytes())["address"]
    except OSError:  # not there, or not to be had for now
        return None
    return address


async def watch(control: ControlLink, router_id: str, table: WorkerTable) -> None:
    """Runs until cancelled."""
    num_failures = 0
    while True:
        try:
            stub = await control.find()
            async for snapshot in stub.Watch(cluster_pb2.WatchRequest(router_id=router_id)):
                table.apply(parsed(snapshot))
                num_failures = 0
            logger.warning("the controller ended its watch")
        except grpc.aio.AioRpcError as error:
            logger.warning("no watch of the controller: %s", error.details())
        except Unavailable as error:
            logger.warning("no watch of the controller: %s", error.message)
        num_failures += 1
        await asyncio.sleep(back_off_s(num_failures, base_s=0.1, limit_s=2.0))
