"""The Ray actor around one worker. The worker itself knows nothing of Ray.

Imported by the controller as well, which must stay light: torch and the worker's own code are loaded by
`start`, inside the worker's process. gRPC channels and servers are made there too, never before a fork.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from cluster.actors.actor_process import die_with_parent, live_past_nccl, log_to
from cluster.control.worker_handle import Loading, Started, StartEvent, StartFailed, WorkerSpec
from cluster.nodes.network import LOOPBACK, Bind
from cluster.nodes.processes import ProcessId
from trust.trust import Trust

if TYPE_CHECKING:
    from cluster.actors.role_worker import LoadedEngine, RoleWorker

log = logging.getLogger(__name__)


class WorkerActor:
    def __init__(self, spec: WorkerSpec) -> None:
        die_with_parent()
        live_past_nccl()
        log_to(spec.log_folder, spec.worker_id, spec.observability)
        self._spec = spec
        self._worker: RoleWorker | None = None
        self._told: list[StartEvent] = []
        self._news = asyncio.Event()
        self._starting: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()
        code = Path(__file__).parents[2]
        log.info("starting worker=%s node=%s code=%s", spec.worker_id, _node_address(), code)

    async def start(self, trust: Trust) -> AsyncIterator[StartEvent]:
        """Loading any number of times, then Started or StartFailed.

        The start goes on whoever asked for it: another controller may ask again, hears how it stands, and
        then the same.
        """
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start(trust))
        num_seen = max(0, len(self._told) - 1)
        while True:
            for event in self._told[num_seen:]:
                num_seen += 1
                yield event
                if not isinstance(event, Loading):
                    await asyncio.shield(self._starting)
                    return
            if num_seen == len(self._told):
                await self._news.wait()

    async def _start(self, trust: Trust) -> None:
        loop, node, process = asyncio.get_running_loop(), socket.gethostname(), ProcessId.of(os.getpid())

        def progress(detail: str) -> None:
            loop.call_soon_threadsafe(self._tell, Loading(node, process.pid, detail, process))

        self._tell(Loading(node, process.pid, "loading libraries", process))
        try:
            loaded = await asyncio.to_thread(_load_engine, self._spec, progress)
            host = _node_address() if self._spec.bind is Bind.NODE else LOOPBACK
            self._worker = _make_worker(self._spec, loaded, trust, host)
            self._tell(Started(await self._worker.start()))
        except Exception as error:  # whatever it is, the controller must hear of it
            log.exception("worker=%s cannot start", self._spec.worker_id)
            self._tell(StartFailed(_in_one_line(error)))

    def _tell(self, event: StartEvent) -> None:
        self._told.append(event)
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def wait_stopped(self) -> None:
        await self._stopped.wait()

    async def stop(self, drain_timeout_s: float | None) -> None:
        """Drain, at most for so long, then end. It goes on whoever asked for it, and once."""
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop(drain_timeout_s))
        await asyncio.shield(self._stopping)

    async def _stop(self, drain_timeout_s: float | None) -> None:
        if self._worker is not None:
            try:
                await asyncio.wait_for(self._worker.drain(), drain_timeout_s)
            except asyncio.TimeoutError:
                log.warning(
                    "worker=%s drained for %s s: its work ends here", self._spec.worker_id, drain_timeout_s
                )
            await self._worker.stop()
        self._stopped.set()


def _node_address() -> str:
    """The one by which the other nodes of this Ray know this node."""
    return str(ray.util.get_node_ip_address())


def _load_engine(spec: WorkerSpec, progress: Callable[[str], None]) -> LoadedEngine:
    from cluster.actors.role_worker import load_engine  # torch comes with it

    return load_engine(spec, progress)


def _make_worker(spec: WorkerSpec, loaded: LoadedEngine, trust: Trust, host: str) -> RoleWorker:
    from cluster.actors.role_worker import make_worker

    return make_worker(spec, loaded, trust, host)


def _in_one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if text and type(error).__module__.startswith("engine") else f"{type(error).__name__}: {text}"
