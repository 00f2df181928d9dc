"""A worker as a Ray actor, seen from the controller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial

import ray
from ray import ObjectRef, ObjectRefGenerator
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError, RuntimeEnvSetupError
from ray.runtime_env import RuntimeEnv

from cluster.actors.named import NAMESPACE, actor_name, kill_actor
from cluster.actors.worker_actor import WorkerActor
from cluster.control.worker_handle import Loading, Pending, StartEvent, StartFailed, WorkerGone, WorkerSpec
from cluster.nodes.network import Bind, is_here
from cluster.nodes.placement import Wanted, can_take, why_pending
from cluster.nodes.processes import ProcessId
from cluster.nodes.ray_environment import packed
from cluster.nodes.ray_nodes import is_placed, process_here, ray_nodes
from trust.trust import Trust

# How often it is told why a worker waits.
_LOOK_EVERY_S = 1.0


class RayWorker:
    """Implements WorkerHandle. `actor`: the one that runs already, if it is not to be made.

    `trust` is told to a process that runs, by a call of its own: what an actor is made of, Ray keeps.
    """

    def __init__(self, trust: Trust, spec: WorkerSpec, actor: ActorHandle[WorkerActor] | None = None) -> None:
        self._trust = trust
        self._spec = spec
        self._actor = actor
        self._process: ProcessId | None = None
        self._is_killed = False

    async def start(self) -> AsyncIterator[StartEvent]:
        try:
            wanted = await asyncio.to_thread(_where, self._spec)
            environment = None
            if self._actor is None:
                environment = await asyncio.to_thread(packed, self._spec.pool.runtime_env)
                await asyncio.to_thread(self._make, wanted, environment)
                if self._is_killed:
                    raise WorkerGone("it was given up while it was being made")
            else:
                self._process = await asyncio.to_thread(process_here, self._actor)
            actor = self._started()
            events = actor.start.options(num_returns="streaming").remote(self._trust)
            async for reference in _with_patience(events, partial(_why_no_news, actor, wanted, environment)):
                event: StartEvent = reference if isinstance(reference, Pending) else await reference
                if isinstance(event, Loading):
                    self._process = self._process or event.process
                yield event
        except RayActorError as error:
            raise WorkerGone(how_it_died(error)) from error
        except RayTaskError as error:
            yield StartFailed(f"{type(error.cause).__name__}: {error.cause}")
        except RuntimeEnvSetupError as error:
            yield StartFailed(f"its runtime_env cannot be set up: {str(error).strip().splitlines()[-1]}")
        except ValueError as error:
            yield StartFailed(f"Ray cannot make it: {error}")

    def _make(self, wanted: Wanted, environment: RuntimeEnv | None) -> None:
        """On a thread: it waits for Ray's head, which may be away, for longer perhaps than anybody waits for
        the worker. Then it is ended here as soon as it is there."""
        self._actor = _create(self._spec, wanted, environment)
        if self._is_killed:
            self.kill()

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
        self._is_killed = True
        if self._actor is not None:
            kill_actor(self._actor, self._process)


def _where(spec: WorkerSpec) -> Wanted:
    """What a node must have. A worker on loopback is of use on this machine only."""
    wanted, here = spec.wanted(), str(ray.util.get_node_ip_address())
    nodes = ray_nodes()
    near = [node.node_id for node in nodes if is_here(node.address, here)]
    return wanted.only_on(near) if spec.bind is Bind.LOOPBACK and len(near) < len(nodes) else wanted


def _create(spec: WorkerSpec, wanted: Wanted, environment: RuntimeEnv | None) -> ActorHandle:
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
            label_selector=dict(wanted.labels),
            runtime_env=environment,
        )
        .remote(spec)
    )


async def _with_patience(
    events: ObjectRefGenerator, why_no_news: Callable[[], Pending]
) -> AsyncIterator[ObjectRef[StartEvent] | Pending]:
    """All events; until the first one comes, why it does not."""
    first = asyncio.ensure_future(anext(events))
    try:
        while not (await asyncio.wait({first}, timeout=_LOOK_EVERY_S))[0]:
            yield await asyncio.to_thread(why_no_news)
        yield await first
    except StopAsyncIteration:
        return
    finally:
        first.cancel()
    async for event in events:
        yield event


def _why_no_news(actor: ActorHandle, wanted: Wanted, environment: RuntimeEnv | None) -> Pending:
    if is_placed(actor):
        return Pending("its process is starting")
    nodes = ray_nodes()
    has_room = any(can_take(wanted, node) for node in nodes)
    if environment is not None and has_room:
        return Pending("Ray sets up its runtime_env")
    why = f"waits to be placed: wants {wanted}; {why_pending(wanted, nodes)}"
    return Pending(why, finds_no_room=not has_room)


def how_it_died(error: RayActorError) -> str:
    """Ray's account, without its advice."""
    text = _in_one_line(error)
    _, _, detail = text.partition("Worker exit detail: ")
    return f"its process ended: {(detail or text).split('. ')[0]}"


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())
