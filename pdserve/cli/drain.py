"""`pdserve drain WORKER`."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from pdserve.cli.console import err, out
from pdserve.cli.scale import Wait
from pdserve.cli.target import Choice, Target, asks_router
from pdserve.cli.watching import Steps, wait_until_settled
from pdserve.client import Cluster, NotFound, Role

Limit = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        min=0,
        help="How long its requests may go on there; then other workers take them over. Default: no limit.",
    ),
]


@asks_router
def drain(
    choice: Choice,
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Its id, as pdserve status shows it.")],
    replace: Annotated[
        bool, typer.Option("--replace", metavar="", help="Keep the pool's size: start another.")
    ] = False,
    timeout: Limit = None,
    wait: Wait = True,
) -> None:
    """Take one worker away without losing a request: no new work, then the end once it has nothing left.

    Examples:
        pdserve drain decode-1
        pdserve drain prefill-0 --replace
    """
    asyncio.run(_drain(choice.target(), worker, replace, timeout, wait))
    out.print(f"{worker} is drained" if wait else f"{worker} drains: see pdserve status")


async def _drain(target: Target, worker: str, replace: bool, timeout_s: float | None, wait: bool) -> None:
    async with target.client() as client:
        before = await client.get_cluster(timeout=10.0)
        role = _role_of(before, worker)
        steps = Steps(before)
        after = await client.drain_worker(worker, replace=replace, drain_timeout_s=timeout_s, timeout=10.0)
        if any(pool.role is role and pool.target == 0 for pool in after.pools):
            told = f"{role.value} has no worker then: requests wait until there is one, or their time is over"
            err.print(f"{told} (pdserve scale {role.value}=1)", style="yellow", markup=False)
        steps.show(after)
        if wait:
            await wait_until_settled(client, {role}, steps, timeout_s=3600.0)


def _role_of(cluster: Cluster, worker_id: str) -> Role:
    workers = {worker.id: worker.role for pool in cluster.pools for worker in pool.workers}
    if worker_id not in workers:
        raise NotFound(f"there is no worker {worker_id!r}; there are: {', '.join(workers)}")
    return workers[worker_id]
