"""Which cluster a command speaks to: `--address`, `--name`, or the only one that runs here."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.state import find_cluster

Address = Annotated[
    str | None,
    typer.Option("--address", "-a", metavar="HOST:PORT", help="The router to speak to, wherever it runs."),
]
Name = Annotated[
    str | None,
    typer.Option("--name", metavar="NAME", help="A cluster that runs here. Default: the only one."),
]


def router_address(address: str | None, name: str | None) -> str:
    """Raises StateError where that is none or more than one."""
    if address is not None and name is not None:
        raise typer.BadParameter("give --address or --name, not both")
    return address if address is not None else find_cluster(name).router
