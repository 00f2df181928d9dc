"""A router on scripted workers. After every test its tables are empty, and so are its workers'."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pdserve.client import Client
from pdserve.v1 import cluster_pb2
from router.config import RouterConfig
from router.front.server import RouterServer
from router.integrity import IntegrityError
from router.router import Router
from tests.scripted_workers import ScriptedDecode, ScriptedPrefill, ScriptedWorker
from tests.static_control import StaticControl
from tests.trusted import TRUST_FILES


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """For what happens in other tasks and processes without a signal that a test could wait for."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError("did not come true in time")
        await asyncio.sleep(0.005)


@dataclass
class Cluster:
    """What a test plays with."""

    control: StaticControl
    server: RouterServer
    client: Client
    prefills: list[ScriptedPrefill] = field(default_factory=list)
    decodes: list[ScriptedDecode] = field(default_factory=list)
    colocated: list[ScriptedDecode] = field(default_factory=list)

    @property
    def router(self) -> Router:
        return self.server.router

    @property
    def p(self) -> ScriptedPrefill:
        return self.prefills[0]

    @property
    def d(self) -> ScriptedDecode:
        return self.decodes[0]

    @property
    def workers(self) -> list[ScriptedWorker]:
        return [*self.prefills, *self.decodes, *self.colocated]

    def pools(self) -> list[cluster_pb2.PoolStatus]:
        pools = []
        for role, workers in (
            (cluster_pb2.ROLE_PREFILL, self.prefills),
            (cluster_pb2.ROLE_DECODE, self.decodes),
            (cluster_pb2.ROLE_COLOCATED, self.colocated),
        ):
            if workers or (role != cluster_pb2.ROLE_COLOCATED and not self.colocated):
                statuses = [worker.status() for worker in workers]
                pools.append(cluster_pb2.PoolStatus(role=role, target=len(workers), workers=statuses))
        return pools

    async def show(self) -> None:
        await self.control.show(self.pools())

    async def ready(self) -> None:
        await self.show()
        await until(lambda: self.router.table.is_serving and self._all_seen())

    def _all_seen(self) -> bool:
        usable = {worker.info.instance_id for worker in self.router.table.all() if worker.is_usable}
        return {worker.instance_id for worker in self.workers if worker.server is not None} <= usable

    def is_idle(self) -> bool:
        try:
            self.router.check_idle()
        except IntegrityError:
            return False
        return not any(decode.reserved for decode in (*self.decodes, *self.colocated))


@asynccontextmanager
async def running(
    model_dir: Path,
    *,
    num_prefills: int = 1,
    num_decodes: int = 1,
    num_colocated: int = 0,
    **settings: object,
) -> AsyncIterator[Cluster]:
    decodes = [ScriptedDecode(f"decode-{index}") for index in range(num_decodes)]
    by_instance = {decode.instance_id: decode for decode in decodes}
    prefills = [ScriptedPrefill(f"prefill-{index}", by_instance) for index in range(num_prefills)]
    colocated = [
        ScriptedDecode(f"colocated-{index}", cluster_pb2.ROLE_COLOCATED) for index in range(num_colocated)
    ]
    async with AsyncExitStack() as stack:
        await _start((*prefills, *decodes, *colocated), stack)
        control = await stack.enter_async_context(StaticControl())
        fields = {
            "grpc": "127.0.0.1:0",
            "cluster": "test",
            "router_id": "router-0",
            "model": "tiny",
            "model_dir": model_dir,
            "control": control.address,
            "trust": TRUST_FILES,
            **settings,
        }
        router = Router(RouterConfig.model_validate(fields))
        server = await stack.enter_async_context(RouterServer(router))
        client = await stack.enter_async_context(Client(server.address))
        cluster = Cluster(control, server, client, prefills, decodes, colocated)
        if cluster.workers:
            await cluster.ready()
        yield cluster
        await until(cluster.is_idle)
        router.check_idle()


async def _start(workers: Iterable[ScriptedWorker], stack: AsyncExitStack) -> None:
    for worker in workers:
        await worker.start()
        stack.push_async_callback(worker.stop)
