"""A real router on workers that are processes of their own, to be killed and stopped while they are used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from pdserve.client import Client
from pdserve.v1 import cluster_pb2
from router.config import RouterConfig
from router.events import LifetimeEvent
from router.front.server import RouterServer
from router.integrity import IntegrityError
from router.router import Router
from tests.faults.worker_processes import Process, has_nothing, launch_worker
from tests.integration.router.harness import until
from tests.static_control import StaticControl
from tests.trusted import TRUST_FILES
from worker.identity import Role

# So long that nobody is given up who only waits for a core: each time costs the request a retry.
PATIENCE_S = 4.0
_ROLES = {Role.PREFILL: cluster_pb2.ROLE_PREFILL, Role.DECODE: cluster_pb2.ROLE_DECODE}


class Fleet:
    """It tells the router what a controller would: which workers there are, and which are dead."""

    def __init__(self, folder: Path, transport: str, control: StaticControl, router: Router) -> None:
        self.router = router
        # By the names that the router's events call them.
        self.workers: dict[str, Process] = {}
        # The last worker of each role that a request was sent to.
        self.used: dict[Role, str] = {}
        self._folder = folder
        self._transport = transport
        self._control = control
        self._statuses: dict[str, cluster_pb2.WorkerStatus] = {}
        self._processes = AsyncExitStack()
        router.on_event(self._note)

    async def launch(self, roles: Mapping[Role, int]) -> None:
        """Returns when the router may choose them."""
        starts = [self._launch(role) for role, num_workers in roles.items() for _ in range(num_workers)]
        names = set(await asyncio.gather(*starts))
        await self._show()
        await until(lambda: names <= {w.info.id for w in self.router.table.all() if w.is_usable}, 20.0)

    async def bury(self, name: str) -> None:
        """It was killed, and the router is told."""
        await self.workers.pop(name).process.wait()
        self._statuses[name].state = cluster_pb2.WORKER_STATE_DEAD
        await self._show()

    def of(self, role: Role) -> list[str]:
        return [name for name in self.workers if _role_of(name) is role]

    async def until_nothing_is_held(self, timeout_s: float = PATIENCE_S + 5.0) -> None:
        for process in self.workers.values():
            await process.until(has_nothing, timeout_s)
        await until(self._is_router_idle, timeout_s)

    def _is_router_idle(self) -> bool:
        try:
            self.router.check_idle()
        except IntegrityError:
            return False
        return True

    async def close(self) -> None:
        await self._processes.aclose()

    async def _launch(self, role: Role) -> str:
        entering = launch_worker(role.value, self._folder, transport=self._transport, patience_s=PATIENCE_S)
        process = await self._processes.enter_async_context(entering)
        status = await process.status()
        self.workers[status.id], self._statuses[status.id] = process, status
        return str(status.id)

    async def _show(self) -> None:
        pools = {role: cluster_pb2.PoolStatus(role=number) for role, number in _ROLES.items()}
        for name, status in self._statuses.items():
            pools[_role_of(name)].workers.append(status)
        await self._control.show(list(pools.values()))

    def _note(self, event: LifetimeEvent) -> None:
        if event.worker is not None:
            self.used[_role_of(event.worker)] = event.worker


def _role_of(name: str) -> Role:
    return Role(name.partition("-")[0])


@asynccontextmanager
async def fleet(
    folder: Path, transport: str, roles: Mapping[Role, int]
) -> AsyncIterator[tuple[Fleet, Client]]:
    async with AsyncExitStack() as stack:
        control = await stack.enter_async_context(StaticControl())
        config = RouterConfig(
            grpc="127.0.0.1:0",
            cluster="test",
            router_id="router-0",
            model="tiny",
            model_dir=folder,
            control=control.address,
            trust=TRUST_FILES,
        )
        server = await stack.enter_async_context(RouterServer(Router(config)))
        client = await stack.enter_async_context(Client(server.address))
        made = Fleet(folder, transport, control, server.router)
        stack.push_async_callback(made.close)
        await made.launch(roles)
        yield made, client
