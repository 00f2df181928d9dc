"""`pdserve restart [POOL ...]`."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import typer

from pdserve.cli.console import INTERRUPTED, err, out
from pdserve.cli.target import Choice, Target, asks_router
from pdserve.cli.watching import SERVING, Steps, is_whole, patiently, wait_until_at_rest
from pdserve.client import (
    Client,
    Cluster,
    FailedPrecondition,
    NotFound,
    Pool,
    Unavailable,
    Worker,
    WorkerState,
)

_LOOK_EVERY_S = 0.2
# A new controller does not know of what the one before it was asked.
_ASK_AGAIN_S = 10.0
# What a router's predecessor has for its requests, if nothing is said.
_ROUTER_DRAIN_S = 300.0

Pools = Annotated[
    list[str] | None, typer.Argument(metavar="[POOL ...]", help="prefill, decode, colocated. Default: all.")
]
Limit = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        min=0,
        help="How long each may drain. Default: no limit; a router 300.",
    ),
]
Routers = Annotated[
    bool,
    typer.Option(
        "--router",
        metavar="",
        help="Put new processes in the routers' places, instead of the workers'; with POOL: besides.",
    ),
]
Surge = Annotated[
    bool,
    typer.Option(
        "--surge/--no-surge", metavar="", help="Start the new worker first, where Ray has room / not."
    ),
]


@asks_router
def restart(
    choice: Choice,
    pools: Pools = None,
    timeout: Limit = None,
    surge: Surge = True,
    router: Routers = False,
) -> None:
    """Replace the workers of the pools by new ones, one at a time. No request is lost.

    A new worker starts first; when it is ready the old one takes no new work, finishes what it has, and goes.
    Ctrl-C stops behind the one that is at it. What another command has begun in a pool is waited for first.

    Examples:
        pdserve restart
        pdserve restart decode --timeout 30
        pdserve restart --router
    """
    rolling = Rolling(surge, timeout)
    try:
        asyncio.run(_restart(choice.target(), rolling, pools or [], router))
    except KeyboardInterrupt:
        err.print(f"interrupted: {rolling.told()}")
        raise typer.Exit(INTERRUPTED) from None
    out.print(f"[green]{rolling.told()}[/]")


async def _restart(target: Target, rolling: Rolling, names: list[str], routers: bool) -> None:
    async with target.client() as client:
        if names or not routers:
            await rolling.run(client, names)
        if routers:
            await rolling.run_routers(client)


class Rolling:
    """One rolling restart, as far as it has come."""

    def __init__(self, surge: bool, drain_timeout_s: float | None) -> None:
        self._surge = surge
        self._drain_timeout_s = drain_timeout_s
        self._num_done = 0
        self._num_workers = 0
        self._current: str | None = None
        self._what = "workers"
        self._without_any = "nothing was replaced"

    def told(self) -> str:
        if not self._num_workers:
            return self._without_any
        done = f"{self._num_done} of {self._num_workers} {self._what} are new"
        if self._current is None:
            return done
        return f"{done}; {self._current} is still being replaced in the background, see pdserve status"

    async def run(self, client: Client, names: list[str]) -> None:
        """Raises PdserveError."""
        first = await client.get_cluster(timeout=10.0)
        roles = [pool.role for pool in _named(first, names)]
        steps = Steps(first)
        pools = await wait_until_at_rest(client, first, roles, steps)
        workers = [worker for pool in pools for worker in pool.workers if worker.state in SERVING]
        self._num_workers = len(workers)
        of = " and ".join(role.value for role in roles)
        self._without_any = f"nothing was replaced: no worker is wanted in {of}"
        for worker in workers:
            self._current = worker.id
            await self._replace(client, worker, steps)
            self._num_done += 1
        self._current = None

    async def run_routers(self, client: Client) -> None:
        """One after the other. Whoever is connected is asked to connect again. Raises PdserveError."""
        routers = (await patiently(client)).routers
        if self._num_workers:
            out.print(self.told())
        self._what, self._num_done, self._num_workers = "routers", 0, len(routers)
        for each in routers:
            self._current = each.id
            limit = _ROUTER_DRAIN_S if self._drain_timeout_s is None else self._drain_timeout_s
            after = await client.restart_router(each.id, drain_timeout_s=limit, timeout=90.0)
            who = f"{each.id} at {each.grpc}{_pid_of(after, each.id)}"
            out.print(f"{who} is new; the one before has {limit:g} s for what it does")
            self._num_done += 1
        self._current = None

    async def _replace(self, client: Client, worker: Worker, steps: Steps) -> None:
        """One that has gone by itself meanwhile is new already, or will be."""
        asked_at: float | None = None
        # Whether it has been shown why it goes.
        is_explained = not self._surge
        while True:
            cluster = await patiently(client)
            steps.show(cluster)
            pool = cluster.pool(worker.role)
            if pool is None or is_replaced(pool, worker):
                return
            state = _state_of(pool, worker)
            is_explained = is_explained or state is WorkerState.DRAINING
            if asked_at is not None and not is_explained and _went_first(pool, worker):
                out.print(
                    f"{worker.id} went before another was ready: there is no room for both", markup=False
                )
                is_explained = True
            if asked_at is not None and pool.unrecoverable_reason:
                raise Unavailable(f"{worker.id} stays, no other can start: {pool.unrecoverable_reason}")
            if state in SERVING and (asked_at is None or _is_forgotten(pool, asked_at)):
                asked_at = time.monotonic()
                await self._ask(client, worker)
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _ask(self, client: Client, worker: Worker) -> None:
        try:
            await client.drain_worker(
                worker.id,
                replace=True,
                replace_first=self._surge,
                drain_timeout_s=self._drain_timeout_s,
                timeout=10.0,
            )
        except (FailedPrecondition, NotFound):
            pass  # it goes already: somebody else has asked since we looked


def is_replaced(pool: Pool, worker: Worker) -> bool:
    """It is gone, and its pool is whole."""
    return _state_of(pool, worker) is None and is_whole(pool)


def _went_first(pool: Pool, worker: Worker) -> bool:
    """It is gone, and what comes in its place is not ready."""
    num_ready = sum(each.state is WorkerState.READY for each in pool.workers)
    return _state_of(pool, worker) is None and num_ready < pool.target


def _state_of(pool: Pool, worker: Worker) -> WorkerState | None:
    """None: this process is gone."""
    states = (each.state for each in pool.workers if each.instance_id == worker.instance_id)
    return next(states, None)


def _is_forgotten(pool: Pool, asked_at: float) -> bool:
    """Nothing happens any more, and should."""
    return is_whole(pool) and time.monotonic() - asked_at > _ASK_AGAIN_S


def _pid_of(cluster: Cluster, router_id: str) -> str:
    pids = [router.pid for router in cluster.routers if router.id == router_id and router.pid]
    return f" (pid {pids[0]})" if pids else ""


def _named(cluster: Cluster, names: list[str]) -> list[Pool]:
    pools = {pool.role.value: pool for pool in cluster.pools}
    for name in names:
        if name not in pools:
            there = f"{cluster.name} has {' and '.join(pools)}"
            raise typer.BadParameter(f"there is no pool {name!r}; {there}")
    return [pool for name, pool in pools.items() if not names or name in names]
