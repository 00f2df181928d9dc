"""One of a cluster's actors sees to it that another is there: the controller the routers', each of them the
controller. Several may guard the same one, since Ray gives a name to one actor only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from cluster.actors.named import kill_actor
from cluster.actors.ray_worker import how_it_died
from cluster.control.policy import Restarts
from cluster.control.snapshot import PartState
from cluster.nodes.ray_nodes import process_here
from pdserve.v1.errors import Unavailable

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
# For an actor's start, and then for each of its answers.
_START_TIMEOUT_S = 90.0
_SILENT_AFTER_S = 30.0


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
        self._restarts = Restarts()
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
        await asyncio.sleep(self._restarts.delay_s)
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
            await asyncio.to_thread(lambda: kill_actor(actor, process_here(actor)))
        log.warning("%s: %s", self._what, self.state.trouble)
        self._restarts.note_end(time.monotonic() - began)

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
