"""One of a cluster's actors sees to it that another is there: the controller the routers', each of them the
controller. Several may guard the same one, since Ray gives a name to one actor only.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.actors.ray_worker import NAMESPACE, how_it_died
from cluster.control.policy import retry_delay_s
from cluster.control.snapshot import PartState
from cluster.nodes.ray_nodes import process_here
from pdserve.v1.errors import Unavailable

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
# For an actor's start, and then for each of its answers.
_START_TIMEOUT_S = 90.0
_SILENT_AFTER_S = 30.0
# One that lived so long has not failed at its start.
_LIVED_S = 60.0


def named_actor(kind: type, name: str, *arguments: object) -> ActorHandle:
    """The one of that name; made if there is none: detached, on this node, taking nothing of Ray's count."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {
        "name": name,
        "namespace": NAMESPACE,
        "get_if_exists": True,
        "lifetime": "detached",
        "max_restarts": 0,
        "num_cpus": 0,
        "scheduling_strategy": here,
    }
    return ray.remote(kind).options(**options).remote(*arguments)


class Guard:
    """`find` gives the actor, made anew if it is gone. It has `start`, which all may call, and `ping`, which
    answers the pid of what serves. `on_change`: called when `state` is another.
    """

    def __init__(
        self, what: str, find: Callable[[], ActorHandle], on_change: Callable[[], None] = lambda: None
    ) -> None:
        self._what = what
        self._find = find
        self._on_change = on_change
        self._num_failures = 0
        self.state = PartState()

    async def restart(self, drain_s: float) -> None:
        """Of a router. Raises Unavailable where no other can take its place: then it stays."""
        actor = await asyncio.to_thread(self._find)
        try:
            await actor.restart.remote(drain_s)
            # The next look is up to a second away, and whoever asked is told of the new one now.
            self._heard(await actor.ping.remote())
        except RayTaskError as error:
            raise Unavailable(f"{self._what} stays: {error.cause}", reason="CANNOT_START") from error
        except RayActorError as error:
            raise Unavailable(f"{self._what}: {how_it_died(error)}", reason="ROUTER_LOST") from error

    async def keep(self) -> None:
        """One time around: until the actor is gone. Again and again, it is always there."""
        await asyncio.sleep(retry_delay_s(self._num_failures - 1) if self._num_failures else 0)
        actor = await asyncio.to_thread(self._find)
        began = time.monotonic()
        try:
            await self._until_gone(actor)
        except RayTaskError as error:
            self._note(PartState(f"cannot start: {error.cause}"))
        except RayActorError as error:
            self._note(PartState(how_it_died(error)))
        except asyncio.TimeoutError:
            self._note(PartState("does not answer"))
            await asyncio.to_thread(end_actor, actor)
        log.warning("%s: %s", self._what, self.state.trouble)
        self._num_failures = 0 if time.monotonic() - began > _LIVED_S else self._num_failures + 1

    async def _until_gone(self, actor: ActorHandle) -> None:
        where = await asyncio.wait_for(actor.start.remote(), _START_TIMEOUT_S)
        log.info("%s serves %s", self._what, where)
        while True:
            pid = await asyncio.wait_for(actor.ping.remote(), _SILENT_AFTER_S)
            self._heard(pid)
            await asyncio.sleep(_LOOK_EVERY_S)

    def _heard(self, pid: int | None) -> None:
        self._note(PartState("is being started again" if pid is None else "", pid))

    def _note(self, state: PartState) -> None:
        if state != self.state:
            self.state = state
            self._on_change()


def end_actor(actor: ActorHandle) -> None:
    """At once, whatever it does. No error if it is gone."""
    process = process_here(actor)
    ray.kill(actor, no_restart=True)
    # A stopped process does not hear Ray.
    if process is not None and process.find() is not None:
        os.kill(process.pid, signal.SIGKILL)
