"""What Ray says of its nodes, and of an actor that it has still to place. Ray has no public way to ask for
either without its dashboard, hence its own state."""

from __future__ import annotations

import ray
from ray._private import state
from ray.actor import ActorHandle

from cluster.nodes.placement import Node


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
