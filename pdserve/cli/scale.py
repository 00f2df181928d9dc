"""`pdserve scale POOL=N ...`."""

from __future__ import annotations

import asyncio
from typing import Annotated

import psutil
import typer

from cluster.config import MAX_WORKERS
from cluster.state import find_cluster
from pdserve.cli.console import err, out
from pdserve.cli.room import lack_of_memory
from pdserve.cli.target import Choice, Target, asks_router
from pdserve.cli.watching import Steps, wait_until_settled
from pdserve.client import Cluster, Role

Wait = Annotated[bool, typer.Option("--wait/--no-wait", metavar="", help="Return when it is done / at once.")]
Timeout = Annotated[float, typer.Option("--timeout", metavar="SECONDS", min=0, help="How long to wait.")]
Pools = Annotated[list[str], typer.Argument(metavar="POOL=N", help="prefill=N, decode=N or colocated=N.")]


@asks_router
def scale(
    choice: Choice,
    pools: Pools,
    wait: Wait = True,
    timeout: Timeout = 600.0,
) -> None:
    """Set how many workers the pools have. No request is lost: a worker that goes finishes what it has.

    0 is allowed: requests then wait until their time is over.

    Examples:
        pdserve scale prefill=2 decode=2
        pdserve scale decode=1 --no-wait
    """
    targets = _parsed(pools)
    reached = asyncio.run(_scale(choice.target(), targets, wait, timeout, _is_here(choice)))
    told = " ".join(f"{role.value}={target}" for role, target in reached.items())
    out.print(f"[green]{told}[/]" if wait else f"{told} is under way: see pdserve status")


def _is_here(choice: Choice) -> bool:
    """Whether all its workers are on this machine."""
    return choice.address is None and find_cluster(choice.name).owns_ray


def _parsed(pools: list[str]) -> dict[str, int]:
    targets: dict[str, int] = {}
    for text in pools:
        name, target = _parsed_one(text)
        if name in targets:
            raise typer.BadParameter(f"{name} stands twice")
        targets[name] = target
    return targets


def _parsed_one(text: str) -> tuple[str, int]:
    name, equals, number = text.partition("=")
    if not equals:
        raise typer.BadParameter(f"{text!r} is not POOL=N, like prefill=2 or decode=2")
    if not (number.isascii() and number.isdecimal() and len(number) <= 9 and int(number) <= MAX_WORKERS):
        raise typer.BadParameter(f"{text!r}: a pool has 0 to {MAX_WORKERS} workers")
    return name, int(number)


async def _scale(
    asked: Target, wanted: dict[str, int], wait: bool, timeout_s: float, is_here: bool
) -> dict[Role, int]:
    async with asked.client() as client:
        cluster = await client.get_cluster(timeout=10.0)
        targets = _by_role(wanted, cluster)
        lack = lack_of_memory(cluster, targets, psutil.virtual_memory().available) if is_here else None
        if lack is not None:
            err.print(f"warning: {lack}", style="yellow", markup=False)
        steps = Steps(cluster)
        for role, target in targets.items():
            steps.show(await client.scale_pool(role, target, timeout=10.0))
        if wait:
            await wait_until_settled(client, set(targets), steps, timeout_s)
    return targets


def _by_role(wanted: dict[str, int], cluster: Cluster) -> dict[Role, int]:
    """Nothing is scaled where one of the names is wrong."""
    roles = {pool.role.value: pool.role for pool in cluster.pools}
    for name in wanted:
        if name not in roles:
            there = f"{cluster.name} has {' and '.join(roles)}"
            raise typer.BadParameter(f"there is no pool {name!r}; {there}")
    return {roles[name]: target for name, target in wanted.items()}
