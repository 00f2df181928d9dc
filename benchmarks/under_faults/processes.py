"""Processes of a cluster that its own status does not name."""

from __future__ import annotations

from collections.abc import Mapping

import psutil

from cluster.nodes.processes import family
from cluster.state import running_clusters

_CONTROLLER = "ray::Controller"


def router_and_controller(address: str) -> Mapping[str, int]:
    """Pids by name; what cannot be found is left out. `address`: the router's."""
    found: dict[str, int] = {}
    for record in running_clusters():
        if record.router != address:
            continue
        for process in family(record.processes, record.session):
            try:
                command = process.cmdline()
            except psutil.NoSuchProcess:
                continue
            if command[1:3] == ["-m", "router"]:
                found["router"] = process.pid
            elif command and command[0].startswith(_CONTROLLER):
                found["controller"] = process.pid
    return found
