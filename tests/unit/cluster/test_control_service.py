"""`Control`, over gRPC: what is refused changes nothing, and a watcher sees every step in order."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc
import pytest
import pytest_asyncio

from cluster.config import MAX_WORKERS, ClusterConfig
from cluster.control.control_service import ControlService, Watchers
from cluster.control.membership import WorkerState
from cluster.control.snapshot import cluster_snapshot
from pdserve.v1 import cluster_pb2 as pb
from pdserve.v1.cluster_pb2_grpc import ControlStub, add_ControlServicer_to_server
from pdserve.v1.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable, from_rpc_error
from tests.unit.cluster.harness import Cluster, config, started
from worker.identity import Role

S = WorkerState


@dataclass
class Served:
    cluster: Cluster
    stub: ControlStub
    saved_targets: list[int] = field(default_factory=list)
    is_disk_full: bool = False
    drained_routers_s: list[float] = field(default_factory=list)

    def save_targets(self) -> None:
        if self.is_disk_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.saved_targets.append(self.cluster.membership.pools[Role.DECODE].target)

    async def restart_router(self, drain_s: float) -> None:
        if drain_s > 100:
            raise Unavailable("router-0 stays: the port is taken", reason="CANNOT_START")
        self.drained_routers_s.append(drain_s)


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    """1P1D, both ready."""
    wanted: ClusterConfig = config(1, 1)
    watchers = Watchers()
    server = grpc.aio.server()
    async with started(wanted) as cluster:
        membership = cluster.membership
        cluster.on_change = lambda: watchers.tell(cluster_snapshot(wanted, membership))
        cluster.script.may_start.set()
        cluster.script.may_finish.set()
        await cluster.until({"prefill-0": S.READY, "decode-0": S.READY})
        port = server.add_insecure_port("127.0.0.1:0")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            result = Served(cluster, ControlStub(channel))
            service = ControlService(
                membership,
                cluster.supervisor,
                watchers,
                lambda: cluster_snapshot(wanted, membership),
                result.save_targets,
                {"router-0": result.restart_router},
            )
            add_ControlServicer_to_server(service, server)
            await server.start()
            yield result
        await server.stop(None)


@pytest.mark.parametrize(
    ("request_", "kind", "told"),
    [
        (
            pb.ScalePoolRequest(role=pb.ROLE_DECODE, target=2**32 - 1),
            InvalidArgument,
            f"limit of {MAX_WORKERS}",
        ),
        (pb.ScalePoolRequest(role=pb.ROLE_DECODE, target=MAX_WORKERS + 1), InvalidArgument, "over the limit"),
        (pb.ScalePoolRequest(target=1), InvalidArgument, "name prefill, decode or colocated"),
        (pb.ScalePoolRequest(role=pb.ROLE_COLOCATED, target=1), NotFound, "no colocated pool"),
        (pb.DrainWorkerRequest(worker_id="decode-9"), NotFound, "no worker 'decode-9'"),
    ],
)
async def test_what_is_refused_changes_nothing(
    served: Served, request_: pb.ScalePoolRequest | pb.DrainWorkerRequest, kind: type[Exception], told: str
) -> None:
    is_scale = isinstance(request_, pb.ScalePoolRequest)
    version = served.cluster.membership.version
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (served.stub.ScalePool(request_) if is_scale else served.stub.DrainWorker(request_))
    error = from_rpc_error(caught.value)
    assert isinstance(error, kind)
    assert told in error.message
    assert served.cluster.membership.version == version
    assert served.saved_targets == []


@pytest.mark.parametrize(
    "request_",
    [
        pb.ScalePoolRequest(role=pb.ROLE_DECODE, target=3),
        pb.DrainWorkerRequest(worker_id="decode-0"),
        pb.DrainWorkerRequest(worker_id="decode-0", replace_first=True),
    ],
)
async def test_a_target_that_cannot_be_written_down_is_refused_and_nothing_begins(
    served: Served, request_: pb.ScalePoolRequest | pb.DrainWorkerRequest
) -> None:
    served.is_disk_full = True
    is_scale = isinstance(request_, pb.ScalePoolRequest)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (served.stub.ScalePool(request_) if is_scale else served.stub.DrainWorker(request_))
    error = from_rpc_error(caught.value)
    assert (type(error), error.reason) == (Unavailable, "CANNOT_KEEP_TARGETS")
    assert "No space left" in error.message
    served.cluster.supervisor.reconcile()
    assert served.cluster.states() == {"prefill-0": S.READY, "decode-0": S.READY}
    assert served.cluster.membership.pools[Role.DECODE].target == 1
    assert not any(member.is_leaving for member in served.cluster.membership.members())


async def test_a_watcher_sees_every_step_of_a_scale_down(served: Served) -> None:
    watch = served.stub.Watch(pb.WatchRequest(router_id="r"))
    first = await watch.read()
    assert [len(pool.workers) for pool in first.pools] == [1, 1]
    answer = await served.stub.ScalePool(pb.ScalePoolRequest(role=pb.ROLE_DECODE, target=0))
    assert answer.pools[1].workers[0].state == pb.WORKER_STATE_DRAINING
    states, version = [], first.version
    while not states or states[-1]:
        snapshot = await watch.read()
        assert snapshot.version == version + 1
        version = snapshot.version
        states.append([worker.state for worker in snapshot.pools[1].workers])
    ready, draining, stopped = pb.WORKER_STATE_READY, pb.WORKER_STATE_DRAINING, pb.WORKER_STATE_STOPPED
    assert states == [[ready], [draining], [stopped], []]
    assert served.saved_targets == [0]
    watch.cancel()


async def test_draining_takes_the_target_along_unless_it_is_to_be_replaced(served: Served) -> None:
    await served.stub.DrainWorker(pb.DrainWorkerRequest(worker_id="decode-0", replace=True))
    assert served.cluster.membership.pools[Role.DECODE].target == 1
    await served.cluster.until({"prefill-0": S.READY, "decode-1": S.READY})
    await served.stub.DrainWorker(pb.DrainWorkerRequest(worker_id="decode-1"))
    assert served.cluster.membership.pools[Role.DECODE].target == 0
    await served.cluster.until({"prefill-0": S.READY})


async def test_a_worker_that_is_replaced_first_takes_no_target_along(served: Served) -> None:
    request = pb.DrainWorkerRequest(worker_id="decode-0", replace_first=True, timeout_ms=1500)
    await served.stub.DrainWorker(request)
    assert served.cluster.membership.pools[Role.DECODE].target == 1
    await served.cluster.until({"prefill-0": S.READY, "decode-1": S.READY})
    assert served.cluster.script.handles[1].drain_timeout_s == 1.5
    # Its place is free again for the next one.
    await served.stub.DrainWorker(pb.DrainWorkerRequest(worker_id="decode-1", replace_first=True))
    await served.cluster.until({"prefill-0": S.READY, "decode-0": S.READY})


async def test_a_router_is_restarted_by_its_id_or_not_at_all(served: Served) -> None:
    await served.stub.RestartRouter(pb.RestartRouterRequest(router_id="router-0", timeout_ms=2500))
    assert served.drained_routers_s == [2.5]
    for wanted, kind in (
        (pb.RestartRouterRequest(router_id="router-1", timeout_ms=1), NotFound),
        (pb.RestartRouterRequest(router_id="router-0", timeout_ms=200_000), Unavailable),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.stub.RestartRouter(wanted)
        assert isinstance(from_rpc_error(caught.value), kind)
    assert served.drained_routers_s == [2.5]


async def test_only_a_ready_worker_can_be_drained(served: Served) -> None:
    served.cluster.script.may_finish.clear()
    await served.stub.DrainWorker(pb.DrainWorkerRequest(worker_id="decode-0"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.stub.DrainWorker(pb.DrainWorkerRequest(worker_id="decode-0"))
    assert isinstance(from_rpc_error(caught.value), FailedPrecondition)


async def test_get_cluster_brings_fresh_reports_under_the_controllers_word(served: Served) -> None:
    snapshot = await served.stub.GetCluster(pb.GetClusterRequest())
    prefill = snapshot.pools[0].workers[0]
    assert (prefill.id, prefill.state, prefill.pid) == ("prefill-0", pb.WORKER_STATE_READY, 7)
    assert prefill.limits.kv_blocks_total == 64
