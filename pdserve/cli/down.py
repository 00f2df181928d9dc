"""`pdserve down [NAME]`."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster import ending
from cluster.errors import StateError
from cluster.state import ClusterRecord, read_record, running_clusters, state_root
from pdserve.cli.console import INTERRUPTED, err, left_behind, out

Cluster = Annotated[str | None, typer.Argument(metavar="NAME", help="Default: the only one that runs here.")]


def down(name: Cluster = None) -> None:
    """End a cluster: exactly the processes that up started. Requests in flight end with an error.

    Examples:
        pdserve down
        pdserve down local
    """
    record = _wanted(name)
    if record is None:
        out.print(f'the cluster "{name}" is down already' if name else "no cluster runs here: nothing to end")
        return
    try:
        ending.down(record, err.print)
    except KeyboardInterrupt:
        err.print(left_behind(record.name))
        raise typer.Exit(INTERRUPTED) from None
    out.print(f"{record.name} is down")


def _wanted(name: str | None) -> ClusterRecord | None:
    """None: there is nothing to end. Raises StateError where it is not clear which one is meant."""
    if name is not None:
        record = read_record(name)
        if record is None and not (state_root() / name).is_dir():
            names = ", ".join(running.name for running in running_clusters())
            these = f"; these run: {names}" if names else ""
            raise StateError(f'there never was a cluster "{name}" here{these}')
        return record
    running = running_clusters()
    if len(running) > 1:
        names = ", ".join(record.name for record in running)
        raise StateError(f"several clusters run ({names}); say which one to end")
    return running[0] if running else None
