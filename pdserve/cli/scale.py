"""`pdserve scale POOL=N ...`."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from cluster.config import MAX_WORKERS
from pdserve.cli.console import out
from pdserve.cli.target import Address, Name, router_address
from pdserve.cli.watching import Steps, wait_until_settled
from pdserve.client import Client, Role

Wait = Annotated[bool, typer.Option("--wait/--no-wait", metavar="", help="Return when it is done / at once.")]
Timeout = Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="How long to wait.")]
Pools = Annotated[list[str], typer.Argument(metavar="POOL=N", help="prefill=N, decode=N or colocated=N.")]


def scale(
    pools: Pools,
    address: Address = None,
    name: Name = None,
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
    asyncio.run(_scale(router_address(address, name), targets, wait, timeout))
    reached = " ".join(f"{role.value}={target}" for role, target in targets.items())
    out.print(f"[green]{reached}[/]" if wait else f"{reached} is under way: see pdserve status")


def _parsed(pools: list[str]) -> dict[Role, int]:
    targets: dict[Role, int] = {}
    for text in pools:
        role, target = _parsed_one(text)
        if role in targets:
            raise typer.BadParameter(f"{role.value} stands twice")
        targets[role] = target
    return targets


def _parsed_one(text: str) -> tuple[Role, int]:
    name, equals, number = text.partition("=")
    names = [role.value for role in Role]
    if not equals:
        raise typer.BadParameter(f"{text!r} is not POOL=N, like prefill=2 or decode=2")
    if name not in names:
        raise typer.BadParameter(f"{text!r}: there is no pool {name!r}; there are {', '.join(names)}")
    if not (number.isascii() and number.isdecimal() and len(number) <= 9 and int(number) <= MAX_WORKERS):
        raise typer.BadParameter(f"{text!r}: a pool has 0 to {MAX_WORKERS} workers")
    return Role(name), int(number)


async def _scale(address: str, targets: dict[Role, int], wait: bool, timeout_s: float) -> None:
    async with Client(address) as client:
        steps = Steps(await client.get_cluster(timeout=10.0))
        for role, target in targets.items():
            steps.show(await client.scale_pool(role, target, timeout=10.0))
        if wait:
            await wait_until_settled(client, set(targets), steps, timeout_s)
