"""A cluster's actors by their names: how each is called, made, found and ended."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

import ray
from ray.actor import ActorHandle
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.nodes.processes import ProcessId

# All our actors, of all clusters, are in this namespace of Ray.
NAMESPACE = "pdserve"


def actor_name(cluster: str, what: str) -> str:
    """Every actor of a cluster is named, and its name begins with the cluster's."""
    return f"{cluster}/{what}"


def named_actor(kind: type, name: str, *arguments: object) -> ActorHandle:
    """The one of that name; made if there is none: detached, on this node, taking nothing of Ray's count."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {
        "name": name,
        "namespace": NAMESPACE,
        "get_if_exists": True,
        "lifetime": "detached",
        "max_restarts": 0,
        "num_cpus": 0,
        "scheduling_strategy": here,
    }
    return ray.remote(kind).options(**options).remote(*arguments)


def actors_of(cluster: str) -> dict[str, ActorHandle]:
    """By the part of the name behind the cluster's: "controller", "router-0", "decode-1/KEY"."""
    prefix, found = actor_name(cluster, ""), {}
    for each in list_named_actors(all_namespaces=True):
        if each["namespace"] == NAMESPACE and each["name"].startswith(prefix):
            with suppress(ValueError):  # it ended meanwhile
                found[each["name"].removeprefix(prefix)] = ray.get_actor(each["name"], NAMESPACE)
    return found


def workers_of(cluster: str) -> dict[str, ActorHandle]:
    """By "prefill-0/KEY"."""
    return {name: actor for name, actor in actors_of(cluster).items() if "/" in name}


def kill_actor(actor: ActorHandle, process: ProcessId | None) -> None:
    """At once, whatever it does. No error if it is gone. `process`: its own; used on its node."""
    ray.kill(actor, no_restart=True)
    # A stopped process does not hear Ray: after 5 s its node's raylet kills it. Here it need not wait.
    if process is not None and process.find() is not None:
        os.kill(process.pid, signal.SIGKILL)
