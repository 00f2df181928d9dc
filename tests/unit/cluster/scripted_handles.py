"""Workers without processes, engines or Ray: they serve Describe and do what a test tells them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc

from cluster.control.worker_handle import (
    Loading,
    Pending,
    Started,
    StartEvent,
    StartFailed,
    WorkerGone,
    WorkerSpec,
)
from pdserve.v1.cluster_pb2 import (
    WORKER_STATE_DRAINING,
    WORKER_STATE_READY,
    KVLayout,
    Quarantine,
    Vitals,
    WorkerLimits,
    WorkerStatus,
)
from pdserve.v1.worker_pb2 import DescribeRequest, DescribeResponse
from pdserve.v1.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=16, block_size=16, dtype="float32")


@dataclass
class Script:
    """What every worker that is started from now on does."""

    start_error: str | None = None
    # Why there is no place for it; it never gets one.
    pending_reason: str | None = None
    layout: KVLayout = field(default_factory=lambda: LAYOUT)
    # Set: workers start and drain at once.
    may_start: asyncio.Event = field(default_factory=asyncio.Event)
    may_finish: asyncio.Event = field(default_factory=asyncio.Event)
    handles: list[ScriptedHandle] = field(default_factory=list)

    def launch(self, spec: WorkerSpec) -> ScriptedHandle:
        handle = ScriptedHandle(spec, self)
        self.handles.append(handle)
        return handle

    def living(self) -> list[ScriptedHandle]:
        return [handle for handle in self.handles if not handle.is_killed]


class ScriptedHandle(WorkerServicer):
    """Implements WorkerHandle, and the worker behind it."""

    def __init__(self, spec: WorkerSpec, script: Script) -> None:
        self.spec = spec
        self.is_killed = False
        self.is_silent = False
        self.state = WORKER_STATE_READY
        self.pid = 7 + len(script.handles)
        self.quarantines: list[Quarantine] = []
        self.vitals = Vitals()
        self._script = script
        self._layout = script.layout
        self._pending_reason = script.pending_reason
        self._stopped = asyncio.Event()
        self._gone = asyncio.Event()
        self._server = grpc.aio.server()
        add_WorkerServicer_to_server(self, self._server)
        self._address: str | None = None
        # It does not even say how it stands.
        self.is_mute = False
        # What it was given for its drain.
        self.drain_timeout_s: float | None = None

    async def start(self) -> AsyncIterator[StartEvent]:
        """Again, for another controller: how it stands."""
        if self.is_mute:
            await self._gone.wait()
            raise WorkerGone("its process ended: signal 9")
        if self._address is not None:
            yield Started(self._address)
            return
        if self._pending_reason is not None:
            yield Pending(self._pending_reason, finds_no_room=True)
            await self._gone.wait()
            raise WorkerGone("it never ran")
        yield Loading(socket.gethostname(), self.pid, "loading weights")
        await self._any_of(self._script.may_start, self._gone)
        if self._gone.is_set():
            raise WorkerGone("its process ended: signal 9")
        if self._script.start_error is not None:
            yield StartFailed(self._script.start_error)
            return
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self._address = f"127.0.0.1:{port}"
        yield Started(self._address)

    async def wait_stopped(self) -> None:
        await self._any_of(self._stopped, self._gone)
        if not self._stopped.is_set():
            raise WorkerGone("its process ended: signal 9")

    async def _any_of(self, *events: asyncio.Event) -> None:
        waits = {asyncio.ensure_future(event.wait()) for event in events}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    async def stop(self, drain_timeout_s: float | None) -> None:
        self.state, self.drain_timeout_s = WORKER_STATE_DRAINING, drain_timeout_s
        await asyncio.wait_for(self._script.may_finish.wait(), drain_timeout_s)
        self._stopped.set()

    def kill(self) -> None:
        self.is_killed = True
        self._gone.set()

    async def close(self) -> None:
        await self._server.stop(None)

    async def Describe(self, request: DescribeRequest, context: object) -> DescribeResponse:
        if self.is_silent:
            await asyncio.Event().wait()
        limits = WorkerLimits(layout=self._layout, kv_blocks_total=64)
        status = WorkerStatus(
            instance_id=self.spec.key,
            pid=self.pid,
            node=socket.gethostname(),
            state=self.state,
            limits=limits,
        )
        status.quarantines.extend(self.quarantines)
        status.vitals.CopyFrom(self.vitals)
        return DescribeResponse(status=status)
