"""`up` as one sequence. Every start has a deadline; what fails takes down all that was started, and says what
failed in the words of the part that failed.
"""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from cluster.config import ClusterConfig, split_address
from cluster.ending import end_cluster
from cluster.errors import LaunchError, PartError, StateError
from cluster.folders import refuse_strangers, with_absolute_paths
from cluster.nodes.local_ray import (
    QUIET,
    RayHead,
    make_folder,
    ray_environment,
    start_local_ray,
)
from cluster.nodes.processes import ProcessId
from cluster.preflight import refuse_context, refuse_device, refuse_early, refuse_kernels
from cluster.readiness import Progress, wait_for_router, wait_for_workers
from cluster.state import (
    ClusterRecord,
    clear_folder,
    control_file,
    fresh_folder,
    locked,
    read_record,
    router_file,
    router_socket,
    write_record,
    write_whole,
)
from cluster.trusted import make_secret, trust_files
from cluster.undisturbed import undisturbed
from engine.errors import ModelError
from engine.weights import resolve_model
from router.bind import unix_target
from router.config import RouterConfig
from trust.trust import TrustFiles

RAY_TIMEOUT_S = 60.0
CONTROLLER_TIMEOUT_S = 60.0
ROUTER_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Launched:
    name: str
    router: str
    # None: no HTTP is served.
    http: str | None
    ray_address: str
    log_folder: Path
    # Where gRPC is served, by each router; the first is `router`.
    routers: tuple[str, ...]
    is_tls: bool


def up(config: ClusterConfig, progress: Progress) -> Launched:
    """Returns when a request can be served. Raises LaunchError or StateError; leaves nothing behind then.

    Ctrl-C leaves nothing either, until it is pressed so often that the record is all there is to end it by.
    """
    refuse_strangers()
    refuse_early(config)
    with locked(config.name) as folder:
        _refuse_a_second(config.name)
        for key, listening in config.router.named_addresses():
            refuse_a_taken_port(key, listening)
        fresh_folder(folder)
        make_secret(folder)
        routers = tuple(address for key, address in config.router.all_addresses() if key == "grpc")
        is_guarded = config.router.is_guarded
        record = ClusterRecord(
            name=config.name, router=config.router.grpc, routers=routers, is_guarded=is_guarded
        )
        try:
            return _launch(config, folder, record, progress)
        except BaseException as error:
            # Ctrl-C included. The record on disk knows more than ours: it is written at every step.
            is_failure = isinstance(error, Exception)
            with undisturbed(lambda word: progress("cluster", word)):
                how = "failed" if is_failure else "interrupted"
                progress("cluster", f"{how}: ending what was started")
                end_cluster(read_record(config.name) or record)
                has_logs = clear_folder(folder, keep_logs=is_failure)
            if isinstance(error, PartError | ModelError):
                where = f" (logs: {folder / 'logs'})" if has_logs else ""
                raise LaunchError(f"{error}{where}") from error
            raise


def _launch(config: ClusterConfig, folder: Path, record: ClusterRecord, progress: Progress) -> Launched:
    anchored = with_absolute_paths(config)
    # Once, here: the workers find the folder and need not wait for each other.
    resolving = _resolve_in_background(config, progress)
    head = _start_ray(config, record, progress)
    model_folder = resolving.result()
    progress("model", "ready")
    # Ray reads its settings from the environment when it is imported: `_start_ray` has put its own there.
    os.environ.update(QUIET)
    from cluster.actors.handles import (
        address,
        bind_here,
        connected,
        refuse_namesake,
        start_controller,
        start_router,
    )

    log_folder = folder / "logs"
    trust = trust_files(anchored, folder)
    for index in range(config.router.replicas):
        written = _router_config(config, index, folder, trust, model_folder).model_dump_json()
        write_whole(router_file(folder, index), written)
    with connected(head.address):
        bind = bind_here(config)
        if config.ray.address != "local":
            refuse_namesake(config.name)
            # From here on there is something to end in it. By what `auto` has found: `down` may see another
            # environment, and another Ray that was started meanwhile.
            write_record(record.model_copy(update={"ray_address": head.address}))
        progress("controller", "starting")
        control = address("the controller", start_controller(anchored, folder, bind), CONTROLLER_TIMEOUT_S)
        starting = [start_router(anchored, folder, bind, index) for index in range(config.router.replicas)]
        wait_for_workers(config, control, trust.read(), progress)
        routers = [address("the router", each, ROUTER_TIMEOUT_S) for each in starting]
        is_guarded = config.router.is_guarded
        doors = [
            unix_target(router_socket(folder, index)) if is_guarded else each
            for index, each in enumerate(routers)
        ]
        for door in doors if all(pool.replicas for pool in config.pools.by_role().values()) else ():
            wait_for_router(door, ROUTER_TIMEOUT_S)
        progress("router", "ready")
    return Launched(
        config.name,
        routers[0],
        config.router.http,
        head.address,
        log_folder,
        tuple(routers),
        is_tls=config.router.tls is not None,
    )


def _resolve_in_background(config: ClusterConfig, progress: Progress) -> Future[Path]:
    """On a daemon thread: Ctrl-C does not wait for a download or a conversion to end."""
    future: Future[Path] = Future()

    def resolve() -> None:
        try:
            refuse_device(config)
            folder = resolve_model(config.model.id, lambda detail: progress("model", detail))
            refuse_context(config, folder)
            refuse_kernels(config, folder)
            future.set_result(folder)
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=resolve, name="resolve-model", daemon=True).start()
    return future


def _start_ray(config: ClusterConfig, record: ClusterRecord, progress: Progress) -> RayHead:
    if config.ray.address != "local":
        return RayHead(address=_find_ray(config.ray.address), processes=())
    progress("ray", "starting")
    ray_folder = make_folder()
    record = record.model_copy(update={"ray_folder": ray_folder})
    write_record(record)
    os.environ.update(ray_environment(ray_folder))

    def on_session(session: ProcessId) -> None:
        nonlocal record
        record = record.model_copy(update={"session": session})
        write_record(record)

    head = start_local_ray(ray_folder, config.ray.num_cpus, RAY_TIMEOUT_S, on_session)
    write_record(record.model_copy(update={"ray_address": head.address, "processes": head.processes}))
    progress("ray", "ready")
    return head


def _find_ray(address: str) -> str:
    os.environ.update(QUIET)
    from cluster.actors.handles import found_at

    return found_at(address)


def _router_config(
    config: ClusterConfig, index: int, folder: Path, trust: TrustFiles, model_folder: Path
) -> RouterConfig:
    return RouterConfig(
        **config.router.settled().replica(index).model_dump(),
        cluster=config.name,
        router_id=f"{config.name}-router-{index}",
        model=config.model.id,
        model_dir=model_folder,
        control_file=control_file(folder),
        local_socket=router_socket(folder, index) if config.router.is_guarded else None,
        trust=trust,
        observability=config.observability,
        max_model_len=config.model.max_model_len,
    )


def _refuse_a_second(name: str) -> None:
    record = read_record(name)
    if record is None:
        return
    if record.is_running():
        raise StateError(
            f'the cluster "{name}" runs already (router at {record.router}); end it with: pdserve down {name}'
        )
    end_cluster(record)


def refuse_a_taken_port(key: str, address: str) -> None:
    """`key`: which setting it is. Raises LaunchError."""
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # Connections that ended just now do not count; somebody who listens does.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise LaunchError(f"router.{key}: {address} cannot be used: {error.strerror}") from error
