"""A worker is connected and gives no sign of life, or leaves: others go on with what it had, at no cost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pdserve.client import Generation
from pdserve.v1 import cluster_pb2, errors, worker_pb2
from tests.integration.router.harness import Cluster, running, until
from tests.scripted_workers import ScriptedDecode, ScriptedWorker, expected

PROMPT = [1, 2, 3]
# What is not to be seen in these tests is a retry that was paid for.
IMPATIENT = {"suspect_after_s": 0.5, "retry_budget": 0}


def is_usable(cluster: Cluster, worker: ScriptedWorker) -> bool:
    return cluster.router.table.can_use(worker.instance_id)


async def heard_of(cluster: Cluster) -> None:
    """Until every worker has said that it lives."""
    await until(lambda: all(worker._vigil._last for worker in cluster.router.table.all()))


async def streaming(cluster: Cluster) -> tuple[asyncio.Future[Generation], ScriptedDecode]:
    """A request in the middle of its answer, and the worker that it is on."""
    for decode in cluster.decodes:
        decode.step_s = 0.02
    generate = cluster.client.generate(PROMPT, max_tokens=40, seed=1, timeout=30)
    work = asyncio.ensure_future(generate)
    await until(lambda: any(decode.num_tokens > 5 for decode in cluster.decodes))
    return work, next(decode for decode in cluster.decodes if decode.num_tokens > 5)


@pytest.mark.parametrize("way", ["silent", "stalled", "heartbeat", "unhealthy"])
async def test_the_streams_of_a_worker_that_may_not_live_go_on_elsewhere(model_dir: Path, way: str) -> None:
    async with running(model_dir, num_decodes=2, **IMPATIENT) as cluster:
        await heard_of(cluster)
        work, busy = await streaming(cluster)
        busy.go.clear()
        if way == "silent":
            busy.signs.speaks.clear()
        elif way == "stalled":
            busy.signs.stall()
        elif way == "heartbeat":
            busy.signs.vitals = cluster_pb2.Vitals(heartbeat_age_ms=600)
        else:
            busy.state = cluster_pb2.WORKER_STATE_UNHEALTHY
            await cluster.show()
        answer = await work
        assert answer.token_ids == expected(PROMPT, 1, 40)
        assert answer.decode_worker != busy.id
        assert answer.completions[0].num_resumes == 1
        assert not is_usable(cluster, busy)
        assert cluster.router._dispatcher.num_moves == 1
        busy.signs.speaks.set()
        busy.signs.live()
        busy.state = cluster_pb2.WORKER_STATE_READY
        await cluster.show()
        await until(lambda: is_usable(cluster, busy))
        busy.go.set()


async def test_where_nobody_else_is_there_a_stream_stays_and_goes_on_when_its_worker_does(
    model_dir: Path,
) -> None:
    async with running(model_dir, **IMPATIENT) as cluster:
        await heard_of(cluster)
        work, busy = await streaming(cluster)
        busy.go.clear()
        busy.signs.stall()
        await until(lambda: not is_usable(cluster, busy))
        # New work waits.
        second = asyncio.ensure_future(cluster.client.generate([9], max_tokens=3, seed=1, timeout=30))
        await until(lambda: cluster.router._dispatcher.admission.num_waiting == 1)
        busy.signs.live()
        busy.go.set()
        answer = await work
        assert answer.token_ids == expected(PROMPT, 1, 40)
        assert answer.completions[0].num_resumes == 0
        assert (await second).token_ids == expected([9], 1, 3)


async def test_a_stream_that_stayed_moves_as_soon_as_there_is_another_worker(model_dir: Path) -> None:
    async with running(model_dir, num_decodes=2, **IMPATIENT) as cluster:
        away = cluster.decodes.pop()
        await cluster.show()
        await until(lambda: not is_usable(cluster, away))
        await heard_of(cluster)
        work, busy = await streaming(cluster)
        busy.go.clear()
        busy.signs.stall()
        await until(lambda: not is_usable(cluster, busy))
        cluster.decodes.append(away)
        await cluster.show()
        answer = await work
        assert answer.token_ids == expected(PROMPT, 1, 40)
        assert answer.decode_worker == away.id
        busy.go.set()
        busy.signs.live()


async def test_a_worker_that_compiles_keeps_its_streams(model_dir: Path) -> None:
    async with running(model_dir, num_decodes=2, **IMPATIENT) as cluster:
        await heard_of(cluster)
        work, busy = await streaming(cluster)
        busy.go.clear()
        busy.signs.vitals = cluster_pb2.Vitals(progress=7, is_working=True, is_compiling=True)
        # Longer than a stall would be borne.
        await asyncio.sleep(1.2)
        assert is_usable(cluster, busy)
        busy.go.set()
        answer = await work
        assert answer.token_ids == expected(PROMPT, 1, 40)
        assert answer.completions[0].num_resumes == 0


async def test_prompts_of_a_prefill_worker_that_may_not_live_are_prefilled_elsewhere(model_dir: Path) -> None:
    async with running(model_dir, num_prefills=2, **IMPATIENT) as cluster:
        await heard_of(cluster)
        for prefill in cluster.prefills:
            prefill.hold_token.clear()
        work = asyncio.ensure_future(cluster.client.generate(PROMPT, max_tokens=5, seed=1, timeout=30))
        await until(lambda: any(prefill.num_prefills for prefill in cluster.prefills))
        busy = next(prefill for prefill in cluster.prefills if prefill.num_prefills)
        (other,) = (prefill for prefill in cluster.prefills if prefill is not busy)
        other.hold_token.set()
        busy.signs.stall()
        answer = await work
        assert answer.token_ids == expected(PROMPT, 1, 5)
        assert answer.prefill_worker == other.id
        await until(lambda: busy.num_cancelled == 1)
        busy.hold_token.set()


@pytest.mark.parametrize("reason", ["DRAINING", "STOPPED"])
async def test_a_prefill_worker_that_drains_costs_no_retry(model_dir: Path, reason: str) -> None:
    async with running(model_dir, num_prefills=2, **IMPATIENT) as cluster:
        for prefill in cluster.prefills:
            prefill.fail_first = errors.Unavailable("leaves", reason=reason)
        answer = await cluster.client.generate(PROMPT, max_tokens=5, seed=1, timeout=30)
        assert answer.token_ids == expected(PROMPT, 1, 5)
        assert answer.completions[0].num_resumes == 2


async def test_a_prefill_worker_whose_engine_is_gone_costs_no_retry_until_it_is_replaced(
    cluster: Cluster,
) -> None:
    """It answers, and takes nothing, until the controller has seen it: longer than a few retries take."""
    cluster.p.fail_always = errors.Unavailable("prefill-0 is failed", reason="FAILED")
    work = asyncio.ensure_future(cluster.client.generate(PROMPT, max_tokens=5, seed=1, timeout=30))
    await until(lambda: work.done() or cluster.p.num_prefills > 5)
    cluster.p.fail_always = None
    assert (await work).token_ids == expected(PROMPT, 1, 5)


async def test_sequences_that_a_worker_ends_as_it_stops_move_at_no_cost(model_dir: Path) -> None:
    async with running(model_dir, num_decodes=2, **IMPATIENT) as cluster:
        work, busy = await streaming(cluster)
        ((transfer_id, epoch),) = busy.reserved
        busy._let_go((transfer_id, epoch))
        failed = worker_pb2.SequenceFailed(
            transfer_id=transfer_id, epoch=epoch, code=14, message="stops", reason="STOPPING"
        )
        busy.send("router-0", worker_pb2.StepOutput(failed=[failed]))
        answer = await work
        assert answer.token_ids == expected(PROMPT, 1, 40)
        assert answer.completions[0].num_resumes == 1


async def test_a_reserve_that_a_worker_takes_along_as_it_ends_is_asked_of_the_next_at_once(
    model_dir: Path,
) -> None:
    async with running(model_dir, num_decodes=2, worker_timeout_s=30.0, **IMPATIENT) as cluster:
        for decode in cluster.decodes:
            decode.hold_reserve.clear()
        work = asyncio.ensure_future(cluster.client.generate(PROMPT, max_tokens=5, seed=1, timeout=20))
        await until(lambda: any(decode.num_reserves for decode in cluster.decodes))
        asked = next(decode for decode in cluster.decodes if decode.num_reserves)
        (other,) = (decode for decode in cluster.decodes if decode is not asked)
        other.hold_reserve.set()
        server, asked.server = asked.server, None
        assert server is not None
        # It has a long time to answer, and does not.
        ending = asyncio.ensure_future(server.stop(15))
        answer = await asyncio.wait_for(work, 10)
        assert answer.token_ids == expected(PROMPT, 1, 5)
        assert answer.decode_worker == other.id
        assert answer.completions[0].num_resumes == 0
        asked.hold_reserve.set()
        await server.stop(0)
        await ending
        asked.reserved.clear()
