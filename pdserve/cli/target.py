"""Which cluster a command speaks to: `--address`, `--name`, or the only one that runs here."""

from __future__ import annotations

import socket
from typing import Annotated

import typer

from cluster.config import split_address
from cluster.state import ClusterRecord, find_cluster, running_clusters

_CONNECT_TIMEOUT_S = 2.0


def _checked_address(address: str | None) -> str | None:
    if address is not None:
        try:
            split_address(address)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    return address


Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        "-a",
        metavar="HOST:PORT",
        callback=_checked_address,
        help="The router to speak to, wherever it runs.",
    ),
]
Name = Annotated[
    str | None,
    typer.Option("--name", metavar="NAME", help="A cluster that runs here. Default: the only one."),
]


def router_address(address: str | None, name: str | None) -> str:
    """Raises StateError where that is none or more than one."""
    if address is not None and name is not None:
        raise typer.BadParameter("give --address or --name, not both")
    return address if address is not None else _answering(find_cluster(name))


def _answering(record: ClusterRecord) -> str:
    """Of several routers the first at whose port somebody is."""
    for address in record.routers if len(record.routers) > 1 else ():
        try:
            socket.create_connection(split_address(address), _CONNECT_TIMEOUT_S).close()
        except OSError:
            continue
        return address
    return record.router


def several_clusters(address: str | None, name: str | None) -> list[ClusterRecord]:
    """All that run here, if none is named and there are at least two; else none."""
    running = running_clusters() if address is None and name is None else []
    return running if len(running) > 1 else []
