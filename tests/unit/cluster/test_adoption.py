"""A new controller takes in the workers that a dead one has left, as they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cluster.control.membership import WorkerState
from cluster.control.supervisor import Launch
from tests.unit.cluster.harness import QUICK, Cluster, cluster_of, config, started
from tests.unit.cluster.scripted_handles import ScriptedHandle
from worker.identity import Role

S = WorkerState
READY = {"prefill-0": S.READY, "decode-0": S.READY}


@asynccontextmanager
async def ready() -> AsyncIterator[Cluster]:
    async with started(config(1, 1)) as cluster:
        cluster.script.may_start.set()
        await cluster.until(READY)
        yield cluster


@asynccontextmanager
async def successor(
    before: Cluster, decode_target: int = 1, patience_s: float = 5.0, start_timeout_s: float = 5.0
) -> AsyncIterator[Cluster]:
    """A supervisor that has adopted, and not begun to bring the pools to their targets.

    The one before it decides nothing any more, as if it were dead.
    """
    before.supervisor.reconcile = before.supervisor._wake.clear  # type: ignore[method-assign]
    after = cluster_of(config(1, decode_target, start_timeout_s), before.script)
    found = {f"{h.spec.worker_id}/{h.spec.key}": _launch_of(h) for h in before.script.living()}
    await after.supervisor.adopt(found, patience_s)
    try:
        yield after
    finally:
        await after.supervisor.close()


def _launch_of(handle: ScriptedHandle) -> Launch:
    return lambda spec: handle


async def test_workers_that_serve_are_taken_in_before_anything_is_decided() -> None:
    async with ready() as before, successor(before) as after:
        assert after.states() == READY
        for member in after.membership.members():
            earlier = before.membership.find(member.worker_id)
            assert earlier is not None
            assert (member.key, member.address) == (earlier.key, earlier.address)
            assert (member.node, member.pid) == (earlier.node, earlier.pid) != ("", None)
        after.supervisor.start()
        await asyncio.sleep(5 * QUICK.probe_every_s)
        assert after.states() == READY
        assert len(before.script.handles) == 2  # nobody was started beside them


async def test_what_died_with_the_controller_is_started_anew() -> None:
    async with ready() as before:
        before.script.may_start.clear()
        before.script.handles[1].kill()
        async with successor(before) as after:
            assert after.states() == {"prefill-0": S.READY}
            after.supervisor.start()
            await after.until({"prefill-0": S.READY, "decode-0": S.STARTING})
            before.script.may_start.set()
            await after.until(READY)


async def test_a_worker_that_was_draining_drains_on() -> None:
    async with ready() as before:
        before.scale(Role.DECODE, 0)
        await before.until({"prefill-0": S.READY, "decode-0": S.DRAINING})
        async with successor(before, decode_target=0) as after:
            assert after.states() == {"prefill-0": S.READY, "decode-0": S.DRAINING}
            after.supervisor.start()
            before.script.may_finish.set()
            await after.until({"prefill-0": S.READY})


async def test_a_target_that_was_lowered_just_before_is_reached_all_the_same() -> None:
    async with ready() as before, successor(before, decode_target=0) as after:
        before.script.may_finish.set()
        after.supervisor.start()
        await after.until({"prefill-0": S.READY})


async def test_a_worker_that_was_loading_goes_on_where_it_is() -> None:
    async with started(config(1, 1)) as before:
        await before.until({"prefill-0": S.STARTING, "decode-0": S.STARTING})
        async with successor(before) as after:
            assert {member.detail for member in after.membership.members()} == {"loading weights"}
            after.supervisor.start()
            before.script.may_start.set()
            await after.until(READY)
            assert len(before.script.handles) == 2


async def test_a_worker_that_does_not_answer_keeps_nobody_waiting_and_is_replaced_in_the_end() -> None:
    async with ready() as before:
        silent = before.script.handles[1]
        silent.is_mute = True
        async with successor(before, patience_s=0.1, start_timeout_s=2.0) as after:
            assert after.states() == {"prefill-0": S.READY, "decode-0": S.STARTING}
            after.supervisor.start()
            before.script.may_start.clear()
            async with after.changed:
                await asyncio.wait_for(after.changed.wait_for(lambda: len(before.script.handles) == 3), 30)
            assert silent.is_killed
            # It says nothing of how the next start will go.
            assert after.membership.pools[Role.DECODE].num_failures == 0
            before.script.may_start.set()
            await after.until(READY)
