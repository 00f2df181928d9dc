"""The process that starts our own Ray: `python -m cluster.nodes.ray_head FOLDER NUM_CPUS`.

Prints one JSON line (RayHead) once Ray takes connections, and exits; what it started stays. It leads a Unix
session, by which everything below our Ray is found again. Ray's own `ray start` cannot stay on the loopback
interface and always adds a client server and a dashboard, hence its parts are put together here.
"""

from __future__ import annotations

import os
import sys

from ray._private.node import Node
from ray._private.parameter import RayParams

from cluster.nodes.local_ray import RayHead
from cluster.nodes.processes import ProcessId

# Pools want the machine's memory; only small messages pass through Ray. Ray takes no less than 75 MB.
OBJECT_STORE_BYTES = 100_000_000


class _HeadNode(Node):  # type: ignore[misc]
    """Ray's head without the dashboard's process, which starts even where the dashboard is off."""

    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        pass


def start_head(folder: str, num_cpus: int) -> RayHead:
    params = RayParams(
        node_ip_address="127.0.0.1",
        gcs_server_port=0,
        min_worker_port=0,
        max_worker_port=0,
        dashboard_agent_listen_port=0,
        num_cpus=num_cpus,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        include_log_monitor=False,
        no_monitor=True,
        temp_dir=folder,
    )
    node = _HeadNode(params, head=True, shutdown_at_exit=False, spawn_reaper=False)
    processes = [
        ProcessId.of(info.process.pid, name) for name, infos in node.all_processes.items() for info in infos
    ]
    return RayHead(address=node.gcs_address, processes=tuple(processes))


if __name__ == "__main__":
    head = start_head(sys.argv[1], int(sys.argv[2]))
    sys.stdout.write(head.model_dump_json() + "\n")
    sys.stdout.flush()
    # Ray's handlers at exit would end what must stay.
    os._exit(0)
