"""What a cell of the matrix is run on: 2 prefill and 2 decode workers and a router, each a process of its own
behind links that a test can disturb, and a replacement of each role that waits for its turn.

    client ── front ──▶ router ── link ──▶ worker        prefill worker ── push ──▶ decode worker
                          └── control ──▶ the test, in the controller's place
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pdserve.client import Client
from pdserve.v1 import cluster_pb2
from router.config import RouterConfig
from tests.faults.link import Link
from tests.faults.matrix.cells import Part
from tests.faults.router_processes import RouterProcess, launch_router
from tests.faults.worker_processes import Process, has_nothing, launch_worker
from tests.static_control import StaticControl
from tests.trusted import TRUST_FILES
from worker.identity import Role

ROLES = (Role.PREFILL, Role.DECODE)
NUM_OF_EACH = 2
# What P waits for D, and D for P, before each gives the other up.
PATIENCE_S = 4.0
# A lease, a broken connection's time to be opened again, a process that was stopped: then nothing is held.
SETTLE_S = 30.0
# One long prompt fills a prefill worker.
BACKLOG_TOKENS = 2048
_NUMBERS = {Role.PREFILL: cluster_pb2.ROLE_PREFILL, Role.DECODE: cluster_pb2.ROLE_DECODE}


@dataclass
class Place:
    """A worker and the links to it."""

    role: Role
    process: Process
    status: cluster_pb2.WorkerStatus
    link: Link
    # Where KV comes; nobody pushes to a prefill worker.
    push: Link
    # Ends the process and its links.
    stack: AsyncExitStack

    @property
    def name(self) -> str:
        return str(self.status.id)

    @property
    def is_alive(self) -> bool:
        return self.process.process.returncode is None


@dataclass
class Rig:
    folder: Path
    scratch: Path
    control: StaticControl
    front: Link
    control_link: Link
    client: Client
    # Of the router, other than the tests' own.
    settings: Mapping[str, object] = field(default_factory=dict)
    places: list[Place] = field(default_factory=list)
    spares: dict[Role, asyncio.Task[Place]] = field(default_factory=dict)
    router: RouterProcess | None = None
    _router_stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    _num_routers: int = 0
    # The last one that was buried: the router is told once more.
    _gone: Place | None = None

    # Who there is.

    def of(self, role: Role) -> list[Place]:
        return [place for place in self.places if place.role is role]

    def named(self, name: str) -> Place:
        return next(place for place in self.places if place.name == name)

    @property
    def running(self) -> RouterProcess:
        assert self.router is not None
        return self.router

    def links(self, part: Part, place: Place | None) -> list[Link]:
        """Those by which a part of the system, or for a worker the one at `place`, is reached."""
        if part is Part.ROUTER:
            return [self.front]
        assert place is not None
        return [place.link, place.push]

    # What it takes to begin.

    async def ready(self) -> None:
        """Everything is there, and the router may choose every worker."""
        if self.router is None:
            await self._start_router()
        for role in ROLES:
            while len(self.of(role)) < NUM_OF_EACH:
                self.places.append(await self._next(role))
        await self.show()
        await self._until_all_are_used()

    async def show(self, draining: Place | None = None) -> None:
        """What the controller would say."""
        pools = []
        for role in ROLES:
            pool = cluster_pb2.PoolStatus(role=_NUMBERS[role], target=NUM_OF_EACH)
            for place in self.of(role):
                state = cluster_pb2.WORKER_STATE_DRAINING if place is draining else place.status.state
                told = pool.workers.add()
                told.CopyFrom(place.status)
                told.state, told.address = state, place.link.address
            pools.append(pool)
        if self._gone is not None:
            told = pools[ROLES.index(self._gone.role)].workers.add()
            told.CopyFrom(self._gone.status)
            told.state = cluster_pb2.WORKER_STATE_DEAD
        await self.control.show(pools)

    async def bury(self, place: Place) -> None:
        """It is gone, by whatever way; another takes its place before the next cell."""
        self.places.remove(place)
        await place.stack.aclose()
        self._gone = place
        await self.show()

    async def bury_router(self) -> None:
        await self._router_stack.aclose()
        self.router = None

    def hold_pushes(self, after_bytes: int = 0) -> None:
        for place in self.of(Role.DECODE):
            place.push.hold(after_bytes)

    def hold_prefills(self) -> None:
        for place in self.of(Role.PREFILL):
            place.link.hold()

    def let_go(self) -> None:
        for place in self.places:
            place.link.let_go()
            place.push.let_go()

    # What must be so when a cell is over.

    async def leaks(self) -> list[str]:
        """What is still held when everything should be over; each in words."""
        found: list[str] = []
        deadline = time.monotonic() + SETTLE_S
        for place in self.places:
            while not has_nothing(status := await place.process.status()):
                if time.monotonic() > deadline:
                    found.append(f"{place.name}: {_in_words(status.load)}")
                    break
                await asyncio.sleep(0.05)  # the other process has no event to wait for
        while held := await self.running.held():
            if time.monotonic() > deadline:
                return [*found, f"router: {held}"]
            await asyncio.sleep(0.05)
        return found

    def num_damaged(self) -> int:
        """Pieces of KV."""
        return sum(place.push.num_damaged for place in self.places)

    async def num_decoded(self) -> int:
        """Tokens, by all decode workers that are there now."""
        statuses = [await place.process.status() for place in self.of(Role.DECODE)]
        return sum(status.counters.tokens_decoded for status in statuses)

    async def close(self) -> None:
        for spare in self.spares.values():
            spare.cancel()
        await asyncio.gather(*self.spares.values(), return_exceptions=True)
        for spare in self.spares.values():
            if not spare.cancelled() and spare.exception() is None:
                await spare.result().stack.aclose()
        for place in self.places:
            await place.stack.aclose()
        await self._router_stack.aclose()

    async def _next(self, role: Role) -> Place:
        """The spare of a role; another one starts in its place."""
        # Taken away first: one that did not start is nobody's next.
        spare = self.spares.pop(role, None) or asyncio.ensure_future(self._launch(role))
        place = await spare
        self.spares[role] = asyncio.ensure_future(self._launch(role))
        return place

    async def _launch(self, role: Role) -> Place:
        async with AsyncExitStack() as stack:
            link = await stack.enter_async_context(Link())
            push = await stack.enter_async_context(Link())
            announced = push.address if role is Role.DECODE else None
            launching = launch_worker(
                role.value, self.folder, patience_s=PATIENCE_S, transport="grpc", announced=announced
            )
            process = await stack.enter_async_context(launching)
            link.target, push.target = process.address, process.pushed_to
            return Place(role, process, await process.status(), link, push, stack.pop_all())

    async def _start_router(self) -> None:
        self._num_routers += 1
        fields: dict[str, object] = {
            "grpc": "127.0.0.1:0",
            "cluster": "test",
            "router_id": f"router-{self._num_routers}",
            "model": "tiny",
            "model_dir": self.folder,
            "control": self.control_link.address,
            "prefill_backlog_tokens": BACKLOG_TOKENS,
            "trust": TRUST_FILES,
        }
        config = RouterConfig.model_validate(fields | dict(self.settings))
        self.router = await self._router_stack.enter_async_context(launch_router(self.scratch, config))
        self.front.target = self.router.address

    async def _until_all_are_used(self) -> None:
        """Asks until each worker has had its part in an answer: there is no other sign from outside."""
        wanted = {place.name for place in self.places}
        deadline = time.monotonic() + SETTLE_S
        number = 0
        while wanted:
            assert time.monotonic() < deadline, f"the router does not use {wanted}"
            number += 1
            ids = [1 + number % 400] * 20
            answer = await self.client.generate(ids, max_tokens=2, ignore_eos=True, timeout=SETTLE_S)
            wanted -= {answer.prefill_worker, answer.decode_worker}


def _in_words(load: cluster_pb2.WorkerLoad) -> str:
    return (
        f"{load.kv_blocks_used} blocks used, {load.num_reservations} reservations, "
        f"{load.num_transfers} transfers, {load.num_running} running"
    )


@asynccontextmanager
async def rig(folder: Path, scratch: Path, **settings: object) -> AsyncIterator[Rig]:
    """`folder`: the model's. `settings`: of the router, other than the tests' own."""
    async with AsyncExitStack() as stack:
        control = await stack.enter_async_context(StaticControl())
        control_link = await stack.enter_async_context(Link(control.address))
        front = await stack.enter_async_context(Link())
        client = await stack.enter_async_context(Client(front.address))
        made = Rig(folder, scratch, control, front, control_link, client, settings)
        stack.push_async_callback(made.close)
        yield made
