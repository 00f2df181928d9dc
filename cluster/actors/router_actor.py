"""The Ray actor that keeps one router running: a child process of its own, without Ray and without torch.

The child's stdin is a pipe: when this actor dies, it closes, and the router ends. All that is ever written to
it is that a successor is there.
Every start and end of the child is in its log, with the child's own lines between. Besides, the actor makes
another controller where there is none any more; the controller does the same for it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

from ray.actor import ActorHandle

from cluster.actors.actor_process import die_with_parent, log_to
from cluster.actors.beats import until_ended
from cluster.actors.guard import Guard
from cluster.actors.named import actor_name, named_actor
from cluster.config import ClusterConfig
from cluster.control.policy import Restarts
from cluster.control.tasks import Once, Tasks
from cluster.nodes.network import Bind
from cluster.state import router_file
from observability.logs import message_of

log = logging.getLogger(__name__)

_START_TIMEOUT_S = 30.0
_STOP_GRACE_S = 10.0


class RouterStartError(Exception):
    """The router did not take its port; says what it said last."""


class RouterActor:
    """`folder`: the cluster's own, on this node, with this router's configuration (see cluster.state)."""

    def __init__(self, config: ClusterConfig, folder: str, bind: Bind, index: int) -> None:
        die_with_parent()
        name = "router" if index == 0 else f"router-{index}"
        log_to(str(Path(folder) / "logs"), name, config.observability)
        self._config_file = router_file(Path(folder), index)
        self._log_path = Path(folder) / "logs" / f"{name}.log"
        self._log_file = open(self._log_path, "ab")  # noqa: SIM115 - the child's stderr, for all its lives
        self._controller = Guard("the controller", lambda: find_controller(config, folder, bind))
        self._child: asyncio.subprocess.Process | None = None
        self._starting = Once(self._start)
        # Held by whoever puts another child in this one's place.
        self._changing = asyncio.Lock()
        # Set when a child has ended, or another is in its place.
        self._is_news = asyncio.Event()
        self._retiring: set[asyncio.subprocess.Process] = set()
        self._tasks = Tasks()
        self._restarts = Restarts()
        self.num_restarts = 0

    async def start(self) -> str:
        """The address it serves. Asked again it is the same. Raises RouterStartError."""
        return await self._starting.done()

    async def _start(self) -> str:
        address = await self._start_child()
        self._tasks.repeat(self._supervise, "supervise")
        self._tasks.repeat(self._controller.keep, "guard of the controller")
        return address

    async def ping(self) -> int | None:
        """The router's pid; None while it is being started again."""
        return self._child.pid if self._child is not None and self._child.returncode is None else None

    async def restart(self, drain_s: float) -> None:
        """Another router takes the ports over; then the one before it ends what it has, in so long at most.

        Raises RouterStartError: all is as before.
        """
        async with self._changing:
            before = self._child
            await self._start_child("--beside")
            self.num_restarts += 1
        if before is not None and before.stdin is not None and before.returncode is None:
            before.stdin.write(b"drain %d\n" % max(1, round(drain_s)))
            self._tasks.start(self._retire(before, drain_s), "retire")

    async def _retire(self, child: asyncio.subprocess.Process, drain_s: float) -> None:
        self._retiring.add(child)
        try:
            await asyncio.wait_for(child.wait(), drain_s + _STOP_GRACE_S)
        except asyncio.TimeoutError:
            log.warning("the router before did not end: pid=%d is killed", child.pid)
        finally:
            self._retiring.discard(child)
            if child.returncode is None:
                child.kill()

    async def rest(self) -> None:
        """Starts nothing any more, neither its router nor a controller: the cluster ends."""
        await self._tasks.close()

    async def stop(self) -> None:
        """Requests in flight have the router's own short time to end."""
        await self.rest()
        if self._child is None or self._child.returncode is not None:
            return
        self._child.terminate()
        try:
            await asyncio.wait_for(self._child.wait(), _STOP_GRACE_S)
        except asyncio.TimeoutError:
            self._child.kill()

    async def _supervise(self) -> None:
        """A router that ends is started again: at once the first time, then ever later."""
        child, started = self._child, time.monotonic()
        while child is not None and child is self._child and child.returncode is None:
            self._is_news.clear()
            await self._is_news.wait()
        if child is not self._child:
            return  # another has taken its ports over, and is the one to look after
        self._restarts.note_end(time.monotonic() - started)
        self.num_restarts += 1
        code = child.returncode if child is not None else None
        log.warning("router ended (code %s); restart %d", code, self.num_restarts)
        await asyncio.sleep(self._restarts.delay_s)
        async with self._changing:
            try:
                if child is self._child:
                    await self._start_child()
            except RouterStartError as error:
                log.error("%s", error)

    async def _watch(self, child: asyncio.subprocess.Process) -> None:
        """Until it has ended, in its place or retired; one that hangs is killed."""
        await until_ended(child)
        self._is_news.set()

    async def _start_child(self, *how: str) -> str:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "router", "--config", str(self._config_file), "--beat", *how),
            env=_without_ray(os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log_file,
        )
        said = child.stdout
        try:
            line = await asyncio.wait_for(said.readline(), _START_TIMEOUT_S) if said is not None else b""
            address: str = json.loads(line)["grpc"]
        except (asyncio.TimeoutError, ValueError, KeyError) as error:
            if child.returncode is None:
                child.kill()
            await child.wait()
            raise RouterStartError(f"the router did not start: {self._last_line()}") from error
        self._child = child
        self._tasks.start(self._watch(child), f"watch pid {child.pid}")
        self._is_news.set()
        log.info("router serves %s pid=%d", address, child.pid)
        return address

    def _last_line(self) -> str:
        lines = self._log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return message_of(lines[-1]) if lines else "it said nothing"


def find_router(config: ClusterConfig, folder: str, bind: Bind, index: int) -> ActorHandle:
    """Made if there is none."""
    return named_actor(RouterActor, actor_name(config.name, f"router-{index}"), config, folder, bind, index)


def find_controller(config: ClusterConfig, folder: str, bind: Bind) -> ActorHandle:
    """Made if there is none."""
    # Each of the two can make the other; and a router's keeper is lighter while it need not.
    from cluster.control.controller import Controller

    return named_actor(Controller, actor_name(config.name, "controller"), config, folder, bind)


def _without_ray(environment: os._Environ[str]) -> dict[str, str]:
    """Ray's settings, its token's path among them, are none of the router's business."""
    return {name: value for name, value in environment.items() if not name.startswith("RAY_")}
