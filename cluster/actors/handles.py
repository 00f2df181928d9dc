"""The cluster's own actors in Ray, as `up` and `down` handle them."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import ray
from ray import ObjectRef
from ray._private.services import canonicalize_bootstrap_address
from ray.exceptions import AuthenticationError, GetTimeoutError, RayActorError, RayTaskError

from cluster.actors.named import NAMESPACE, actor_name, actors_of
from cluster.actors.ray_worker import how_it_died
from cluster.actors.router_actor import find_controller, find_router
from cluster.config import ClusterConfig, split_address
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
    except (ConnectionError, RuntimeError, ValueError, AuthenticationError) as error:
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
    told, found = f"Ray at {address} cannot be reached", found_at(address)
    if ":" not in found:
        return  # no Ray runs here: Ray says so at once
    told += f" ({found})" if found != address else ""
    try:
        socket.create_connection(split_address(found), timeout=_REACH_TIMEOUT_S).close()
        # Ray's own connections take no proxy either.
        with grpc.insecure_channel(found, options=(("grpc.enable_http_proxy", 0),)) as channel:
            grpc.channel_ready_future(channel).result(timeout=_REACH_TIMEOUT_S)
    except OSError as error:
        raise PartError(f"{told}: {error.strerror or error}") from error
    except grpc.FutureTimeoutError as error:
        raise PartError(f"{told}: it does not answer") from error


def found_at(address: str) -> str:
    """What `auto` means here and now, host:port. Another address stays what it is. Raises PartError."""
    if address != "auto":
        return address
    try:
        return canonicalize_bootstrap_address(address) or address
    except ValueError as error:  # RAY_ADDRESS goes before what runs here, and may be for `ray job`
        told = f"{error} (RAY_ADDRESS: {os.environ.get('RAY_ADDRESS')!r})"
        raise PartError(f"Ray at {address} cannot be reached: {told}") from error
    except ConnectionError as error:  # none runs here
        raise PartError(f"Ray at {address} cannot be reached: {error}") from error


def bind_here(config: ClusterConfig) -> Bind:
    """Where this cluster's workers listen, with this process as the driver. Raises PartError."""
    here = str(ray.util.get_node_ip_address())
    return choose_bind(config, [node.address for node in ray_nodes()], here)


def refuse_namesake(cluster: str) -> None:
    """Raises PartError where this Ray has a cluster of that name, started elsewhere: its parts would be taken
    for those that are to be started, and ended with them.
    """
    if actors_of(cluster):
        raise PartError(
            f'this Ray has a cluster "{cluster}" already, of somebody else or from another node: give this '
            f"one another name (actors of that one: {actor_name(cluster, '*')} in the namespace {NAMESPACE})"
        )


def start_controller(config: ClusterConfig, folder: Path, bind: Bind) -> ObjectRef[str]:
    """Its result: the address of its Control. It begins to start workers and routers at once."""
    return find_controller(config, str(folder), bind).start.remote()


def start_router(config: ClusterConfig, folder: Path, bind: Bind, index: int) -> ObjectRef[str]:
    """Its result: the address that the router serves. The controller starts it too; it starts once."""
    return find_router(config, str(folder), bind, index).start.remote()


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
    """Every actor of that cluster, and of no other. Nobody shall replace what ends: first all rest."""
    actors = actors_of(cluster)
    parts = [actor for name, actor in actors.items() if "/" not in name]
    _ask_all([actor.rest.remote() for actor in parts])
    _ask_all([actor.stop.remote() for actor in parts])
    # Once more, for one that was just being made.
    for actor in (*actors.values(), *actors_of(cluster).values()):
        ray.kill(actor)


def _ask_all(answers: list[ObjectRef[None]]) -> None:
    """Each in its own time; who is gone or does not answer is ended all the same."""
    for answer in answers:
        with suppress(RayActorError, GetTimeoutError):
            ray.get(answer, timeout=_STOP_TIMEOUT_S)
