"""Pools are kept at their targets: starts, failures, silence, death and drain, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from cluster.control.membership import IllegalMove, WorkerState
from pdserve.v1.cluster_pb2 import WORKER_STATE_UNHEALTHY, KVLayout, Quarantine, Vitals
from tests.unit.cluster.harness import Cluster, config, started
from worker.identity import Role

S = WorkerState


@pytest_asyncio.fixture
async def running() -> AsyncIterator[Cluster]:
    """1P1D, both ready."""
    async with started(config(1, 1)) as cluster:
        cluster.script.may_start.set()
        await cluster.until({"prefill-0": S.READY, "decode-0": S.READY})
        yield cluster


async def test_a_worker_says_what_it_does_until_it_is_ready() -> None:
    async with started(config(1, 1)) as cluster:
        await cluster.until({"prefill-0": S.STARTING, "decode-0": S.STARTING})
        async with cluster.changed:
            details = lambda: {m.detail for m in cluster.membership.members()}  # noqa: E731
            await asyncio.wait_for(cluster.changed.wait_for(lambda: details() == {"loading weights"}), 5)
        cluster.script.may_start.set()
        await cluster.until({"prefill-0": S.READY, "decode-0": S.READY})


async def test_a_worker_that_cannot_start_says_why_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cluster.control.supervisor.retry_delay_s", lambda num_failures: 0.01)
    async with started(config(1, 0)) as cluster:
        cluster.script.start_error = "no weights in /models/x"
        cluster.script.may_start.set()
        pool = cluster.membership.pools[Role.PREFILL]
        async with cluster.changed:
            await asyncio.wait_for(cluster.changed.wait_for(lambda: pool.unrecoverable_reason != ""), 5)
        assert pool.unrecoverable_reason == "no weights in /models/x"
        assert pool.num_failures == 3
        cluster.script.start_error = None
        await cluster.until({"prefill-0": S.READY})
        assert pool.unrecoverable_reason == ""


async def test_a_worker_that_is_not_ready_in_time_has_failed() -> None:
    async with started(config(0, 1, start_timeout_s=0.1)) as cluster:
        await cluster.until({"decode-0": S.DEAD})
        member = next(cluster.membership.members())
        assert member.detail == "not ready within 0.1 s: loading weights"
        assert cluster.script.living() == []


async def test_a_worker_whose_kv_nobody_could_read_is_refused(running: Cluster) -> None:
    running.script.layout = KVLayout(
        num_layers=2, num_kv_heads=1, head_dim=16, block_size=16, dtype="bfloat16"
    )
    running.scale(Role.DECODE, 2)
    await running.until({"prefill-0": S.READY, "decode-0": S.READY, "decode-1": S.DEAD})
    detail = running.membership.pools[Role.DECODE].members[1].detail
    assert detail == "its KV differs from that of prefill-0: dtype is bfloat16, not float32"


async def test_a_dead_worker_is_replaced_under_its_name(running: Cluster) -> None:
    before = running.membership.find("decode-0")
    running.script.handles[1].kill()
    await running.until({"prefill-0": S.READY, "decode-0": S.STARTING})
    await running.until({"prefill-0": S.READY, "decode-0": S.READY})
    assert running.membership.find("decode-0") is not before


async def test_scaling_down_waits_for_what_a_worker_still_has(running: Cluster) -> None:
    running.scale(Role.DECODE, 2)
    await running.until({"prefill-0": S.READY, "decode-0": S.READY, "decode-1": S.READY})
    running.scale(Role.DECODE, 1)
    assert running.states() == {"prefill-0": S.READY, "decode-0": S.READY, "decode-1": S.DRAINING}
    # Scaling up again does not take it back: it has been told to end.
    running.scale(Role.DECODE, 2)
    ready = {"prefill-0": S.READY, "decode-0": S.READY, "decode-2": S.READY}
    await running.until({**ready, "decode-1": S.DRAINING})
    running.script.may_finish.set()
    await running.until(ready)


async def test_a_worker_that_is_replaced_goes_when_another_is_ready(running: Cluster) -> None:
    running.script.may_start.clear()
    old = running.membership.find("decode-0")
    assert old is not None
    running.supervisor.replace(old, drain_timeout_s=7.0)
    running.supervisor.reconcile()
    both = {"prefill-0": S.READY, "decode-0": S.READY, "decode-1": S.STARTING}
    await running.until(both)
    assert old.detail == "goes when another is ready in its place"
    running.script.may_start.set()
    await running.until({"prefill-0": S.READY, "decode-0": S.DRAINING, "decode-1": S.READY})
    assert running.script.handles[1].drain_timeout_s == 7.0
    running.script.may_finish.set()
    await running.until({"prefill-0": S.READY, "decode-1": S.READY})


async def test_where_there_is_no_room_for_two_the_old_one_goes_first(running: Cluster) -> None:
    running.script.pending_reason = "the nodes are full"
    old = running.membership.find("decode-0")
    assert old is not None
    running.supervisor.replace(old, None)
    running.supervisor.reconcile()
    await running.until({"prefill-0": S.READY, "decode-0": S.DRAINING, "decode-1": S.STARTING})
    assert "before another starts in its place: there is no room for both" in old.detail


async def test_a_worker_stays_where_none_can_start_in_its_place(
    running: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.control.supervisor.retry_delay_s", lambda num_failures: 0.01)
    running.script.start_error = "no weights"
    old = running.membership.find("decode-0")
    assert old is not None
    running.supervisor.replace(old, None)
    running.supervisor.reconcile()
    pool = running.membership.pools[Role.DECODE]
    async with running.changed:
        await asyncio.wait_for(running.changed.wait_for(lambda: pool.unrecoverable_reason != ""), 5)
    await running.until({"prefill-0": S.READY, "decode-0": S.READY})
    assert running.membership.find("decode-0") is old


async def test_only_a_worker_that_serves_can_be_replaced(running: Cluster) -> None:
    old = running.membership.find("decode-0")
    assert old is not None
    running.supervisor.drain(old, None)
    with pytest.raises(IllegalMove):
        running.supervisor.replace(old, None)


async def test_pools_scale_to_nothing_and_back(running: Cluster) -> None:
    running.script.may_finish.set()
    running.scale(Role.PREFILL, 0)
    running.scale(Role.DECODE, 0)
    await running.until({})
    running.scale(Role.DECODE, 1)
    await running.until({"decode-0": S.READY})


async def test_a_worker_that_is_not_wanted_before_it_is_ready_is_given_up() -> None:
    async with started(config(0, 1)) as cluster:
        await cluster.until({"decode-0": S.STARTING})
        cluster.scale(Role.DECODE, 0)
        await cluster.until({})
        assert cluster.script.living() == []
        assert cluster.membership.pools[Role.DECODE].num_failures == 0


async def test_a_worker_without_a_place_says_why_and_keeps_nobody_from_anything(running: Cluster) -> None:
    running.script.pending_reason = "no node has GPU 1"
    running.scale(Role.DECODE, 3)
    both = {"prefill-0": S.READY, "decode-0": S.READY}
    await running.until({**both, "decode-1": S.STARTING, "decode-2": S.STARTING})
    async with running.changed:
        details = lambda: {m.detail for m in running.membership.pools[Role.DECODE].members[1:]}  # noqa: E731
        await asyncio.wait_for(running.changed.wait_for(lambda: details() == {"no node has GPU 1"}), 5)

    running.script.pending_reason = None
    running.scale(Role.PREFILL, 2)
    starting = {"decode-1": S.STARTING, "decode-2": S.STARTING}
    await running.until({**both, "prefill-1": S.READY, **starting})

    running.scale(Role.DECODE, 1)
    assert running.states() == {**both, "prefill-1": S.READY}
    assert len(running.script.living()) == 3
    assert running.membership.pools[Role.DECODE].num_failures == 0


async def test_a_worker_waits_for_a_place_until_its_deadline_and_is_tried_again() -> None:
    async with started(config(0, 1, start_timeout_s=0.2)) as cluster:
        cluster.script.pending_reason = "no node has GPU 1"
        await cluster.until({"decode-0": S.DEAD})
        assert next(cluster.membership.members()).detail == "not ready within 0.2 s: no node has GPU 1"
        cluster.script.pending_reason = None
        cluster.script.may_start.set()
        await cluster.until({"decode-0": S.READY})


async def test_a_new_target_forgets_what_failed_under_the_old_one(
    running: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.control.supervisor.retry_delay_s", lambda num_failures: 0.01)
    running.script.start_error = "no room"
    running.scale(Role.DECODE, 2)
    pool = running.membership.pools[Role.DECODE]
    async with running.changed:
        await asyncio.wait_for(running.changed.wait_for(lambda: pool.unrecoverable_reason != ""), 5)
    running.scale(Role.DECODE, 1)
    await running.until({"prefill-0": S.READY, "decode-0": S.READY})
    assert pool.unrecoverable_reason == ""


async def test_a_silent_worker_is_unhealthy_until_it_answers_again(running: Cluster) -> None:
    running.script.handles[1].is_silent = True
    await running.until({"prefill-0": S.READY, "decode-0": S.UNHEALTHY})
    running.script.handles[1].is_silent = False
    await running.until({"prefill-0": S.READY, "decode-0": S.READY})


async def test_a_worker_that_stays_silent_is_killed_and_replaced(running: Cluster) -> None:
    silent = running.script.handles[1]
    silent.is_silent = True
    await running.until({"prefill-0": S.READY, "decode-0": S.UNHEALTHY})
    await running.until({"prefill-0": S.READY, "decode-0": S.READY})
    assert silent.is_killed


async def test_a_worker_that_answers_and_computes_nothing_is_unhealthy_and_then_replaced(
    running: Cluster,
) -> None:
    stalled = running.script.handles[1]
    stalled.vitals = Vitals(progress=7, is_working=True)
    await running.until({"prefill-0": S.READY, "decode-0": S.UNHEALTHY})
    assert "computed nothing" in running.membership.pools[Role.DECODE].members[0].detail
    await running.until({"prefill-0": S.READY, "decode-0": S.DEAD})
    await running.until({"prefill-0": S.READY, "decode-0": S.READY})
    assert stalled.is_killed


async def test_a_stalled_worker_that_goes_on_is_taken_back(running: Cluster) -> None:
    running.script.handles[1].vitals = Vitals(progress=7, is_working=True)
    await running.until({"prefill-0": S.READY, "decode-0": S.UNHEALTHY})
    running.script.handles[1].vitals = Vitals(progress=8, is_working=True)
    await running.until({"prefill-0": S.READY, "decode-0": S.READY})
    assert not running.script.handles[1].is_killed


async def test_a_worker_whose_steps_take_long_is_given_longer(running: Cluster) -> None:
    slow = running.script.handles[1]
    slow.vitals = Vitals(progress=7, is_working=True, step_ms=60_000)
    await running.until({"prefill-0": S.READY, "decode-0": S.UNHEALTHY})
    # As long as others would be borne, and longer.
    await asyncio.sleep(1.5)
    assert running.states() == {"prefill-0": S.READY, "decode-0": S.UNHEALTHY}
    assert not slow.is_killed


async def test_a_worker_that_compiles_stays_ready_and_says_so(running: Cluster) -> None:
    running.script.handles[1].vitals = Vitals(progress=7, is_working=True, is_compiling=True)
    member = running.membership.pools[Role.DECODE].members[0]
    async with running.changed:
        await asyncio.wait_for(running.changed.wait_for(lambda: member.detail == "compiles"), 5)
    await asyncio.sleep(1.0)
    assert running.states() == {"prefill-0": S.READY, "decode-0": S.READY}


async def test_a_worker_whose_engine_broke_is_replaced(running: Cluster) -> None:
    broken = running.script.handles[0]
    broken.state = WORKER_STATE_UNHEALTHY
    await running.until({"prefill-0": S.STARTING, "decode-0": S.READY})
    await running.until({"prefill-0": S.READY, "decode-0": S.READY})
    assert broken.is_killed


async def test_a_worker_that_might_write_anothers_blocks_for_long_is_killed_and_replaced(
    running: Cluster,
) -> None:
    writing, waiting = running.script.handles
    waiting.quarantines = [Quarantine(sender_pid=writing.pid, num_blocks=3, age_ms=500)]
    await running.until({"prefill-0": S.DEAD, "decode-0": S.READY})
    (dead,) = running.membership.pools[Role.PREFILL].members
    assert dead.detail == "3 blocks of decode-0 wait for it to write no more"
    assert writing.is_killed
    assert not waiting.is_killed
    waiting.quarantines = []
    await running.until({"prefill-0": S.READY, "decode-0": S.READY})


async def test_asking_for_counters_does_not_wait_for_a_worker_that_ends(running: Cluster) -> None:
    running.script.handles[1].is_silent = True
    asking = asyncio.ensure_future(running.supervisor.refresh(timeout_s=5.0))
    await asyncio.sleep(0)
    running.script.handles[1].kill()
    await asyncio.wait_for(asking, 2.0)
    await running.until({"prefill-0": S.READY, "decode-0": S.READY})
