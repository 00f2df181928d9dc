"""Waiting for a cluster to come up: the controller's Watch tells, and then the router's health."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.config import ClusterConfig
from cluster.errors import PartError
from pdserve.v1 import cluster_pb2, cluster_pb2_grpc
from trust.channels import open_channel
from trust.trust import Trust

Progress = Callable[[str, str], None]
"""Told (what, how it stands) of every step: ("decode-0", "loading weights")."""


def wait_for_workers(config: ClusterConfig, control: str, trust: Trust, progress: Progress) -> None:
    """Returns when every pool has what it was configured to have. Raises PartError.

    The first worker that fails at its start ends the waiting: the next ones would fail alike.
    """
    timeout_s = max(pool.start_timeout_s for pool in config.pools.by_role().values()) + 10.0
    with open_channel(control, trust) as channel:
        stub = cluster_pb2_grpc.ControlStub(channel)
        snapshots = stub.Watch(cluster_pb2.WatchRequest(router_id="up"), timeout=timeout_s)
        seen: dict[str, str] = {}
        try:
            for snapshot in snapshots:
                _tell(snapshot, seen, progress)
                if _is_complete(snapshot):
                    snapshots.cancel()  # type: ignore[no-untyped-call]
                    return
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise PartError(f"the controller ended: {error.details()}") from error
            waiting = ", ".join(f"{name}: {how}" for name, how in seen.items() if not how.startswith("ready"))
            raise PartError(f"not ready within {timeout_s:.0f} s: {waiting}") from error
    raise PartError("the controller ended")


def _tell(snapshot: cluster_pb2.ClusterSnapshot, seen: dict[str, str], progress: Progress) -> None:
    for worker in (worker for pool in snapshot.pools for worker in pool.workers):
        if worker.state == cluster_pb2.WORKER_STATE_DEAD:
            raise PartError(f"{worker.id} cannot start: {worker.detail}")
        is_ready = worker.state == cluster_pb2.WORKER_STATE_READY
        how = _ready(worker) if is_ready else worker.detail
        if seen.get(worker.id) != how:
            seen[worker.id] = how
            progress(worker.id, how)


def _ready(worker: cluster_pb2.WorkerStatus) -> str:
    return f"ready, kernels: {worker.kernels}" if worker.kernels else "ready"


def _is_complete(snapshot: cluster_pb2.ClusterSnapshot) -> bool:
    ready = cluster_pb2.WORKER_STATE_READY
    return all(
        sum(worker.state == ready for worker in pool.workers) == pool.target for pool in snapshot.pools
    )


def wait_for_router(address: str, timeout_s: float) -> None:
    """Returns when the router says that it serves. Raises PartError."""
    deadline = time.monotonic() + timeout_s
    with _channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answers = stub.Watch(health_pb2.HealthCheckRequest(), timeout=timeout_s, wait_for_ready=True)
        try:
            for answer in answers:
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    answers.cancel()
                    return
        except grpc.RpcError as error:
            waited = f" within {timeout_s:.0f} s" if time.monotonic() >= deadline else ""
            raise PartError(f"the router at {address} does not serve{waited}: {error.details()}") from error
    raise PartError(f"the router at {address} ended")


@contextmanager
def _channel(address: str) -> Iterator[grpc.Channel]:
    # No proxy: these are addresses of this machine.
    channel = grpc.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),))
    try:
        yield channel
    finally:
        channel.close()
