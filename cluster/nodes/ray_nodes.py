"""What Ray says of its nodes, and where an actor is. Ray has no public way to ask for either without its
dashboard, hence its own state."""

from __future__ import annotations

import psutil
import ray
from ray._private import state
from ray.actor import ActorHandle

from cluster.nodes.network import is_here
from cluster.nodes.placement import Node
from cluster.nodes.processes import ProcessId


def ray_nodes() -> list[Node]:
    """The living ones."""
    free = state.available_resources_per_node()
    return [
        Node(
            node_id=node["NodeID"],
            address=node["NodeManagerAddress"],
            total=node["Resources"],
            free=free.get(node["NodeID"], {}),
            labels=node["Labels"],
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def is_placed(actor: ActorHandle) -> bool:
    """Whether a node has taken it; its process may still be starting there."""
    known = state.actors(actor._actor_id.hex())
    return bool(known) and known["Address"]["IPAddress"] != ""


def process_here(actor: ActorHandle) -> ProcessId | None:
    """Its process, where it runs on this machine."""
    known = state.actors(actor._actor_id.hex())
    if not known or not known["Pid"]:
        return None
    if not is_here(known["Address"]["IPAddress"], str(ray.util.get_node_ip_address())):
        return None
    try:
        return ProcessId.of(known["Pid"])
    except psutil.NoSuchProcess:
        return None
