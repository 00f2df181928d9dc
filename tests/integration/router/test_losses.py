"""Workers fail, stall and vanish: the same tokens come all the same, or one typed error in bounded time."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from pdserve.client import Aborted, DataLoss, Delta, FailedPrecondition, Internal, Unavailable
from pdserve.v1 import cluster_pb2, errors, generation_pb2, worker_pb2
from router.events import LifetimeEvent, Moment
from router.fleet.worker_info import Role
from tests.integration.router.harness import Cluster, running, until
from tests.scripted_workers import ScriptedDecode, ScriptedPrefill, expected

PROMPT = [1, 2, 3]


async def test_a_decode_worker_lost_mid_stream_is_resumed_with_the_same_tokens(model_dir: Path) -> None:
    async with running(model_dir, num_decodes=2) as cluster:
        for decode in cluster.decodes:
            decode.die_after_tokens = 7
        answer = await cluster.client.generate(PROMPT, max_tokens=20, seed=1)
        assert answer.token_ids == expected(PROMPT, 1, 20)
        assert answer.completions[0].num_resumes == 2


async def test_a_worker_that_runs_is_waited_for_where_others_of_its_pool_cannot_start(
    cluster: Cluster,
) -> None:
    pools = cluster.pools()
    pools[1].target, pools[1].unrecoverable_reason = 2, "no second GPU"
    await cluster.control.show(pools)
    await until(lambda: cluster.router.table.targets[Role.DECODE] == 2)
    cluster.d.die_after_tokens = 7  # its stream is opened again
    answer = await cluster.client.generate(PROMPT, max_tokens=20, seed=1)
    assert answer.token_ids == expected(PROMPT, 1, 20)


async def test_a_killed_decode_workers_sequences_go_on_elsewhere(model_dir: Path) -> None:
    async with running(model_dir, num_decodes=2) as cluster:
        for decode in cluster.decodes:
            decode.step_s = 0.01
        work = [
            asyncio.ensure_future(cluster.client.generate([number], max_tokens=40, seed=1))
            for number in range(10)
        ]
        await until(lambda: all(decode.num_tokens > 20 for decode in cluster.decodes))
        await cluster.d.stop()
        answers = await asyncio.gather(*work)
        resumed = 0
        for number, answer in enumerate(answers):
            assert answer.token_ids == expected([number], 1, 40)
            resumed += answer.completions[0].num_resumes
        assert 0 < resumed <= 5 + 1
        cluster.d.reserved.clear()


async def test_one_decode_worker_that_comes_back_as_a_new_process_is_enough(cluster: Cluster) -> None:
    cluster.d.step_s = 0.01
    work = asyncio.ensure_future(cluster.client.generate(PROMPT, max_tokens=30, seed=1))
    await until(lambda: cluster.d.num_tokens > 5)
    await cluster.d.stop()
    cluster.d.reserved.clear()
    fresh = ScriptedDecode("decode-0")
    fresh.address = cluster.d.address
    await fresh.start()
    cluster.p._decodes[fresh.instance_id] = fresh
    cluster.decodes[:] = [fresh]
    await cluster.show()
    assert (await work).token_ids == expected(PROMPT, 1, 30)
    await fresh.stop()


async def test_a_failed_transfer_is_resumed_behind_the_first_token(cluster: Cluster) -> None:
    cluster.p.fail_transfer = errors.Unavailable("link down")
    answer = await cluster.client.generate(PROMPT, max_tokens=10, seed=1)
    assert answer.token_ids == expected(PROMPT, 1, 10)
    assert answer.completions[0].num_resumes == 1
    assert cluster.p.num_prefills == 2


async def test_a_prefill_worker_killed_at_work_costs_a_retry(model_dir: Path) -> None:
    async with running(model_dir, num_prefills=2) as cluster:
        for prefill in cluster.prefills:
            prefill.hold_token.clear()
        work = asyncio.ensure_future(cluster.client.generate(PROMPT, max_tokens=10, seed=1))
        await until(lambda: any(prefill.num_prefills for prefill in cluster.prefills))
        busy = next(prefill for prefill in cluster.prefills if prefill.num_prefills)
        (other,) = (prefill for prefill in cluster.prefills if prefill is not busy)
        other.hold_token.set()
        await busy.stop()
        answer = await work
        assert answer.token_ids == expected(PROMPT, 1, 10)
        assert answer.prefill_worker == other.id


@pytest.mark.parametrize("part", ["prefill", "decode"])
async def test_who_lets_go_of_its_connection_and_answers_no_more_is_not_waited_for(
    model_dir: Path, part: str
) -> None:
    """As a server does that ends: what it has taken up may stay unanswered for as long as it likes."""
    async with running(model_dir, num_prefills=2, num_decodes=2) as cluster:
        for prefill in cluster.prefills if part == "prefill" else []:
            prefill.hold_token.clear()
        for decode in cluster.decodes if part == "decode" else []:
            decode.hold_reserve.clear()
        work = asyncio.ensure_future(cluster.client.generate(PROMPT, max_tokens=10, seed=1))
        if part == "prefill":
            await until(lambda: any(prefill.num_prefills for prefill in cluster.prefills))
            ending, gate = next((p, p.hold_token) for p in cluster.prefills if p.num_prefills)
            next(p for p in cluster.prefills if p is not ending).hold_token.set()
        else:
            await until(lambda: any(decode.num_reserves for decode in cluster.decodes))
            ending, gate = next((d, d.hold_reserve) for d in cluster.decodes if d.num_reserves)
            next(d for d in cluster.decodes if d is not ending).hold_reserve.set()
        assert ending.server is not None
        stopping = asyncio.ensure_future(ending.server.stop(60))
        answer = await work
        assert not stopping.done()
        assert answer.token_ids == expected(PROMPT, 1, 10)
        gate.set()
        await ending.stop()
        await stopping


async def test_a_prefill_worker_that_dies_between_commit_and_answer_is_no_loss(cluster: Cluster) -> None:
    cluster.p.hold_answer.clear()
    work = asyncio.ensure_future(cluster.client.generate(PROMPT, max_tokens=10, seed=1))
    await until(lambda: cluster.d.num_tokens > 3)
    await cluster.p.stop()
    answer = await work
    assert answer.token_ids == expected(PROMPT, 1, 10)
    assert answer.completions[0].num_resumes == 0


async def test_decode_tokens_that_overtake_the_first_one_come_in_order(cluster: Cluster) -> None:
    cluster.p.hold_answer.clear()
    work = asyncio.ensure_future(cluster.client.generate(PROMPT, max_tokens=10, seed=1))
    await until(lambda: cluster.d.num_tokens == 10)
    cluster.p.hold_answer.set()
    answer = await work
    assert answer.token_ids == expected(PROMPT, 1, 10)
    assert answer.usage.cached_tokens == 4


@pytest.mark.parametrize("is_crash", [True, False])
async def test_a_prefill_worker_that_raises_after_accepting_is_an_error_long_before_the_time_limit(
    cluster: Cluster, is_crash: bool
) -> None:
    cluster.p.crash = is_crash
    cluster.p.fail_always = None if is_crash else errors.Unavailable("cannot")
    begin = time.monotonic()
    with pytest.raises(Internal if is_crash else Unavailable):
        await cluster.client.generate(PROMPT, max_tokens=10)
    assert time.monotonic() - begin < 30
    await until(lambda: not cluster.d.reserved)
    # A bug is shown to one worker only, a loss is retried.
    assert cluster.p.num_prefills == (1 if is_crash else 4)
    cluster.p.crash, cluster.p.fail_always = False, None
    await cluster.client.generate(PROMPT, max_tokens=3)


async def test_a_stream_that_cannot_be_resumed_is_aborted_and_its_tokens_stay_valid(cluster: Cluster) -> None:
    cluster.d.step_s = 0.01
    seen: list[int] = []

    async def read() -> None:
        async for event in cluster.client.generate_stream(PROMPT, max_tokens=50, seed=1):
            seen.extend(event.token_ids if isinstance(event, Delta) else ())
            if len(seen) >= 3:
                cluster.p.fail_always = errors.Unavailable("cannot")
                cluster.d.die_after_tokens = 0

    with pytest.raises(Aborted, match="could not be resumed"):
        await read()
    assert tuple(seen) == expected(PROMPT, 1, len(seen))


async def test_damaged_twice_is_data_loss(cluster: Cluster) -> None:
    cluster.p.fail_always = errors.DataLoss("digest differs")
    with pytest.raises(DataLoss):
        await cluster.client.generate(PROMPT, max_tokens=10)
    assert cluster.p.num_prefills == 2


async def test_layouts_that_differ_are_told_at_once(cluster: Cluster) -> None:
    cluster.p.fail_always = errors.FailedPrecondition("layouts differ", reason="LAYOUT_MISMATCH")
    with pytest.raises(FailedPrecondition):
        await cluster.client.generate(PROMPT, max_tokens=10)
    assert cluster.p.num_prefills == 1


async def test_a_sequence_that_the_decode_worker_gives_up_is_resumed(cluster: Cluster) -> None:
    cluster.d.go.clear()
    work = asyncio.ensure_future(cluster.client.generate(PROMPT, max_tokens=10, seed=1))
    await until(lambda: bool(cluster.d._sequences))
    ((transfer_id, epoch),) = cluster.d.reserved
    failed = worker_pb2.SequenceFailed(transfer_id=transfer_id, epoch=epoch, code=14, message="lost it")
    cluster.d._let_go((transfer_id, epoch))
    cluster.d.send("router-0", worker_pb2.StepOutput(failed=[failed]))
    cluster.d.go.set()
    answer = await work
    assert answer.token_ids == expected(PROMPT, 1, 10)
    assert answer.completions[0].num_resumes == 1


async def test_forged_stale_and_foreign_tokens_reach_no_client(cluster: Cluster) -> None:
    cluster.d.go.clear()
    work = asyncio.ensure_future(cluster.client.generate(PROMPT, max_tokens=10, seed=1))
    await until(lambda: bool(cluster.d.reserved))
    ((transfer_id, epoch),) = cluster.d.reserved
    for forged_id, forged_epoch in (("nobody", 1), (transfer_id, epoch + 1), (transfer_id, 0)):
        token = worker_pb2.TokenOutput(transfer_id=forged_id, epoch=forged_epoch, position=1, token_id=65)
        cluster.d.send("router-0", worker_pb2.StepOutput(tokens=[token]))
    cluster.d.go.set()
    assert (await work).token_ids == expected(PROMPT, 1, 10)


async def test_a_release_that_fails_is_tried_again(cluster: Cluster) -> None:
    cluster.d.num_release_failures = 2
    stream = cluster.client.generate_stream(PROMPT, max_tokens=100)
    cluster.d.step_s = 0.01
    async for _ in stream:
        break
    await stream.aclose()
    await until(lambda: not cluster.d.reserved)
    assert cluster.d.num_release_failures == 0


async def test_a_prefill_worker_that_ends_a_sequence_at_its_first_token_is_believed(cluster: Cluster) -> None:
    cluster.p.finish_at_first = generation_pb2.FINISH_REASON_EOS
    answer = await cluster.client.generate(PROMPT, max_tokens=10, seed=1)
    assert (answer.text, len(answer.token_ids)) == ("", 1)
    assert answer.finish_reason.value == "eos"
    assert cluster.d.num_tokens == 0


async def test_a_worker_that_the_controller_calls_dead_loses_its_streams_at_once(model_dir: Path) -> None:
    async with running(model_dir, num_decodes=2) as cluster:
        for decode in cluster.decodes:
            decode.go.clear()
        work = asyncio.ensure_future(cluster.client.generate(PROMPT, max_tokens=10, seed=1))
        await until(lambda: any(decode.reserved for decode in cluster.decodes))
        stuck = next(decode for decode in cluster.decodes if decode.reserved)
        (other,) = (decode for decode in cluster.decodes if decode is not stuck)
        other.go.set()
        stuck.state = cluster_pb2.WORKER_STATE_DEAD
        await cluster.show()
        answer = await work
        assert answer.token_ids == expected(PROMPT, 1, 10)
        assert answer.decode_worker == other.id  # it ended there, wherever it began


async def test_a_worker_that_a_snapshot_leaves_out_keeps_its_streams(model_dir: Path) -> None:
    async with running(model_dir, num_decodes=2) as cluster:
        for decode in cluster.decodes:
            decode.step_s = 0.01
        work = asyncio.ensure_future(cluster.client.generate(PROMPT, max_tokens=30, seed=1))
        await until(lambda: any(decode.num_tokens for decode in cluster.decodes))
        await cluster.control.show([])
        await until(lambda: not cluster.router.table.is_serving)
        answer = await work
        assert answer.completions[0].num_resumes == 0
        await until(lambda: not cluster.router.table.all())
        await cluster.show()
        assert (await cluster.client.generate(PROMPT, max_tokens=3, seed=1)).token_ids == expected(
            PROMPT, 1, 3
        )


async def test_a_decode_worker_lost_during_prefill_ends_the_prefill_too(model_dir: Path) -> None:
    async with running(model_dir, num_prefills=2, num_decodes=2) as cluster:
        for prefill in cluster.prefills:
            prefill.hold_token.clear()
        work = asyncio.ensure_future(cluster.client.generate(PROMPT, max_tokens=10, seed=1))
        await until(lambda: any(prefill.num_prefills for prefill in cluster.prefills))
        await next(decode for decode in cluster.decodes if decode.reserved).stop()
        await until(lambda: sum(prefill.num_cancelled for prefill in cluster.prefills) == 1, 1.0)
        for prefill in cluster.prefills:
            prefill.hold_token.set()
        assert (await work).token_ids == expected(PROMPT, 1, 10)
        for decode in cluster.decodes:
            if decode.server is None:
                decode.reserved.clear()


async def test_a_draining_worker_keeps_its_streams_and_gets_no_new_ones(model_dir: Path) -> None:
    async with running(model_dir, num_decodes=2) as cluster:
        for decode in cluster.decodes:
            decode.step_s = 0.01
        work = asyncio.ensure_future(cluster.client.generate(PROMPT, max_tokens=30, seed=1))
        await until(lambda: any(decode.reserved for decode in cluster.decodes))
        old = next(decode for decode in cluster.decodes if decode.reserved)
        old.state = cluster_pb2.WORKER_STATE_DRAINING
        await cluster.show()
        await until(lambda: len(cluster.router.table.usable(Role.DECODE)) == 1)
        num_before = old.num_reserves
        answers = [await cluster.client.generate([number], max_tokens=3) for number in range(4)]
        assert old.num_reserves == num_before
        assert all(answer.decode_worker != old.id for answer in answers)
        answer = await work
        assert answer.completions[0].num_resumes == 0


STATES = [Moment.QUEUED, Moment.RESERVED, Moment.PREFILL_BEGIN, Moment.PREFILL_END, Moment.FIRST_TOKEN]
STATES += [Moment.TRANSFER_END, Moment.DECODE_BEGIN]


@pytest.mark.parametrize("moment", STATES)
@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_a_worker_killed_at_any_moment_changes_no_token(
    model_dir: Path, moment: Moment, victim: str
) -> None:
    async with running(model_dir, num_prefills=2, num_decodes=2) as cluster:
        killed: list[asyncio.Future[None]] = []

        def kill(event: LifetimeEvent) -> None:
            if event.moment is not moment or killed:
                return
            workers = cluster.prefills if victim == "prefill" else cluster.decodes
            doomed: ScriptedPrefill | ScriptedDecode = next(
                (worker for worker in workers if worker.id == event.worker), workers[0]
            )
            killed.append(asyncio.ensure_future(doomed.stop()))

        cluster.router.on_event(kill)
        answer = await cluster.client.generate(PROMPT, max_tokens=12, seed=4, timeout=20)
        assert answer.token_ids == expected(PROMPT, 4, 12)
        await asyncio.gather(*killed)
        for decode in cluster.decodes:
            if decode.server is None:
                decode.reserved.clear()
