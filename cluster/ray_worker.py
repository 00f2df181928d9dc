"""A worker as a Ray actor, seen from the controller."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import AsyncIterator

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from cluster.processes import ProcessId
from cluster.worker_actor import WorkerActor
from cluster.worker_handle import Loading, StartEvent, StartFailed, WorkerGone, WorkerSpec

# All our actors, of all clusters, are in this namespace of Ray.
NAMESPACE = "pdserve"


def actor_name(cluster: str, what: str) -> str:
    """Every actor of a cluster is named, and its name begins with the cluster's."""
    return f"{cluster}/{what}"


class RayWorker:
    """Implements WorkerHandle."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._actor: ActorHandle[WorkerActor] | None = None
        self._process: ProcessId | None = None

    async def start(self) -> AsyncIterator[StartEvent]:
        try:
            self._actor = _create(self._spec)
            async for reference in self._actor.start.options(num_returns="streaming").remote():
                event: StartEvent = await reference
                if isinstance(event, Loading) and event.node == socket.gethostname():
                    self._process = self._process or ProcessId.of(event.pid)
                yield event
        except RayActorError as error:
            raise WorkerGone(how_it_died(error)) from error
        except RayTaskError as error:
            yield StartFailed(f"{type(error.cause).__name__}: {error.cause}")
        except ValueError as error:
            yield StartFailed(f"Ray cannot make it: {error}")

    async def wait_stopped(self) -> None:
        try:
            await self._started().wait_stopped.remote()
        except RayActorError as error:
            raise WorkerGone(how_it_died(error)) from error

    async def stop(self, drain_timeout_s: float | None) -> None:
        try:
            await self._started().stop.remote(drain_timeout_s)
        except RayActorError as error:
            raise WorkerGone(how_it_died(error)) from error

    def _started(self) -> ActorHandle[WorkerActor]:
        if self._actor is None:
            raise WorkerGone("it was never started")
        return self._actor

    def kill(self) -> None:
        if self._actor is not None:
            ray.kill(self._actor, no_restart=True)
        # A stopped process does not hear Ray. Its pid means something on its own node only.
        if self._process is not None and self._process.find() is not None:
            os.kill(self._process.pid, signal.SIGKILL)


def _create(spec: WorkerSpec) -> ActorHandle:
    """Returns at once; Ray places it when it can."""
    resources = spec.pool.resources
    return (
        ray.remote(WorkerActor)
        .options(
            name=actor_name(spec.cluster, f"{spec.worker_id}/{spec.key}"),
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=0,
            num_cpus=resources.num_cpus,
            num_gpus=resources.num_gpus,
            memory=resources.memory,
            resources=resources.custom,
        )
        .remote(spec)
    )


def how_it_died(error: RayActorError) -> str:
    """Ray's account, without its advice."""
    text = " ".join(str(error).split())
    _, _, detail = text.partition("Worker exit detail: ")
    return f"its process ended: {(detail or text).split('. ')[0]}"
