"""The cluster's own actors in Ray, as `up` and `down` handle them."""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import ray
from ray import ObjectRef
from ray._private.services import canonicalize_bootstrap_address
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.actors.ray_worker import NAMESPACE, actor_name, how_it_died
from cluster.actors.router_actor import RouterActor
from cluster.config import ClusterConfig, split_address
from cluster.control.controller import Controller
from cluster.errors import PartError
from cluster.nodes.network import Bind, choose_bind
from cluster.nodes.ray_nodes import ray_nodes

_STOP_TIMEOUT_S = 15.0
_REACH_TIMEOUT_S = 5.0


@contextmanager
def connected(address: str) -> Iterator[None]:
    """This process as a driver of that Ray. Raises PartError."""
    _refuse_silence(address)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            configure_logging=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise PartError(f"Ray at {address} cannot be reached: {error}") from error
    # Ray puts one in that prints a stack and aborts.
    signal.signal(signal.SIGTERM, on_sigterm)
    try:
        yield
    finally:
        ray.shutdown()


def _refuse_silence(address: str) -> None:
    """Where nobody listens, or what listens does not answer, Ray itself would try for many minutes.

    So it does where `auto` finds one on loopback alone: it asks at this machine's address on the network.
    """
    told = f"Ray at {address} cannot be reached"
    try:
        found = canonicalize_bootstrap_address("auto") if address == "auto" else address
        if found is None or ":" not in found:
            return  # no Ray runs here: Ray says so at once
        told += f" ({found})" if found != address else ""
        socket.create_connection(split_address(found), timeout=_REACH_TIMEOUT_S).close()
        with grpc.insecure_channel(found) as channel:
            grpc.channel_ready_future(channel).result(timeout=_REACH_TIMEOUT_S)
    except OSError as error:
        raise PartError(f"{told}: {error.strerror or error}") from error
    except grpc.FutureTimeoutError as error:
        raise PartError(f"{told}: it does not answer") from error


def bind_here(config: ClusterConfig) -> Bind:
    """Where this cluster's workers listen, with this process as the driver. Raises PartError."""
    here = str(ray.util.get_node_ip_address())
    return choose_bind(config, [node.address for node in ray_nodes()], here)


def start_controller(config: ClusterConfig, folder: Path, bind: Bind) -> ObjectRef[str]:
    """Its result: the address of its Control. It begins to start the workers at once."""
    controller = _create(Controller, actor_name(config.name, "controller"), config, str(folder), bind)
    return controller.start.remote()


def start_router(
    config: ClusterConfig, config_file: Path, log_folder: Path, timeout_s: float
) -> ObjectRef[str]:
    """Its result: the address that the router serves."""
    arguments = (str(config_file), str(log_folder), config.observability)
    router = _create(RouterActor, actor_name(config.name, "router-0"), *arguments)
    return router.start.remote(timeout_s)


def address(what: str, starting: ObjectRef[str], timeout_s: float) -> str:
    """Waits for a part's start to give its address. Raises PartError."""
    try:
        return str(ray.get(starting, timeout=timeout_s))
    except GetTimeoutError as error:
        raise PartError(f"{what} did not start within {timeout_s:.0f} s") from error
    except RayActorError as error:
        raise PartError(f"{what} did not start: {how_it_died(error)}") from error
    except RayTaskError as error:
        raise PartError(f"{what} did not start: {error.cause}") from error


def end_actors(cluster: str) -> None:
    """Every actor of that cluster, and of no other; the controller first, which would replace the rest."""
    prefix = actor_name(cluster, "")
    names = [
        each["name"] for each in list_named_actors(all_namespaces=True) if each["namespace"] == NAMESPACE
    ]
    ours = sorted(
        (name for name in names if name.startswith(prefix)), key=lambda name: "controller" not in name
    )
    for name in ours:
        try:
            actor = ray.get_actor(name, NAMESPACE)
            if name.split("/")[1] in ("controller", "router-0"):
                ray.get(actor.stop.remote(), timeout=_STOP_TIMEOUT_S)
            ray.kill(actor)
        except (ValueError, RayActorError):
            continue  # it ended meanwhile
        except GetTimeoutError:
            ray.kill(actor)


def _create(kind: type, name: str, *arguments: object) -> ray.actor.ActorHandle:
    """A detached actor on this node that takes nothing of Ray's count."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "max_restarts": 0,
        "num_cpus": 0,
        "scheduling_strategy": here,
    }
    return ray.remote(kind).options(**options).remote(*arguments)
