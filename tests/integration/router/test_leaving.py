"""Cancel, deadline and refusal: ordinary exits that leave nothing behind (the fixture looks after each)."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import aclosing
from pathlib import Path

import grpc
import pytest

from pdserve.client import DeadlineExceeded, ResourceExhausted, Unavailable
from pdserve.v1 import cluster_pb2, errors, generation_pb2
from router.deadline import Deadline
from router.events import LifetimeEvent, Moment
from tests.integration.router.harness import Cluster, running, until
from tests.scripted_workers import MAX_SEQUENCE_TOKENS, expected

PROMPT = [5, 6, 7]
MOMENTS = [moment for moment in Moment if moment not in (Moment.RECEIVED, Moment.FINISHED)]


@pytest.mark.parametrize("moment", MOMENTS)
async def test_cancel_at_any_moment_gives_everything_back(cluster: Cluster, moment: Moment) -> None:
    work: list[asyncio.Future[object]] = []
    cluster.router.on_event(lambda event: work[-1].cancel() if event.moment is moment else None)
    for _ in range(5):
        work.append(asyncio.ensure_future(cluster.client.generate(PROMPT, max_tokens=50)))
        with pytest.raises(asyncio.CancelledError):
            await work[-1]
    await until(cluster.is_idle)


async def test_two_hundred_cancels_at_random_times_give_everything_back(model_dir: Path) -> None:
    async with running(model_dir, num_prefills=2, num_decodes=2) as cluster:
        dice = random.Random(1)

        async def one(number: int) -> None:
            call = asyncio.ensure_future(cluster.client.generate([number], max_tokens=40, seed=number))
            await asyncio.sleep(dice.uniform(0, 0.08))
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

        for begin in range(0, 200, 20):
            await asyncio.gather(*(one(number) for number in range(begin, begin + 20)))
        await until(cluster.is_idle)
        answer = await cluster.client.generate(PROMPT, max_tokens=5, seed=1)
        assert answer.token_ids == expected(PROMPT, 1, 5)


async def test_a_cancel_reaches_the_prefill_worker(cluster: Cluster) -> None:
    cluster.p.hold_token.clear()
    work = asyncio.ensure_future(cluster.client.generate(PROMPT, max_tokens=5))
    await until(lambda: cluster.p.num_prefills == 1)
    work.cancel()
    await until(lambda: cluster.p.num_cancelled == 1)
    await until(lambda: not cluster.d.reserved)


async def test_a_cancel_during_reserve_gives_back_what_reserve_takes_later(cluster: Cluster) -> None:
    cluster.d.hold_reserve.clear()
    work = asyncio.ensure_future(cluster.client.generate(PROMPT, max_tokens=5))
    await until(lambda: cluster.d.num_reserves == 1)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    await until(lambda: cluster.router._dispatcher.num_in_flight == 0)
    cluster.d.hold_reserve.set()
    await until(lambda: len(cluster.d.releases) == 1)
    assert not cluster.d.reserved


@pytest.mark.parametrize("place", ["queued", "reserving", "prefilling", "decoding"])
async def test_the_clients_deadline_ends_it_anywhere(cluster: Cluster, place: str) -> None:
    if place == "queued":
        cluster.p.state = cluster_pb2.WORKER_STATE_UNHEALTHY
        await cluster.show()
        await until(lambda: not cluster.router.table.is_serving)
    for gate, name in (
        (cluster.d.hold_reserve, "reserving"),
        (cluster.p.hold_token, "prefilling"),
        (cluster.d.go, "decoding"),
    ):
        if place == name:
            gate.clear()
    begin = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"not done within 0\.3 s"):
        await cluster.client.generate(PROMPT, max_tokens=5, timeout=0.3)
    assert time.monotonic() - begin < 0.6
    for gate in (cluster.d.hold_reserve, cluster.p.hold_token, cluster.d.go):
        gate.set()


async def test_a_prompt_that_cannot_be_computed_in_time_is_refused_at_once(cluster: Cluster) -> None:
    cluster.p.prefill_ms = 300_000.0
    slow, other = [1] * 300, [2] * 300
    await cluster.client.generate(slow, max_tokens=2, timeout=20)
    begin = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="300 prompt tokens take at least") as refused:
        await cluster.client.generate(other, max_tokens=2, timeout=20)
    assert time.monotonic() - begin < 10
    assert refused.value.reason == "DEADLINE_TOO_SHORT"
    assert cluster.p.num_prefills == 1
    # Known prompts may be cached, and short ones take little.
    await cluster.client.generate(slow, max_tokens=2, timeout=20)
    await cluster.client.generate(PROMPT, max_tokens=2, timeout=20)
    # One that has time enough is let in.
    await cluster.client.generate(other, max_tokens=2, timeout=1000)


async def test_without_a_deadline_the_routers_default_holds(model_dir: Path) -> None:
    async with running(model_dir, default_timeout_s=0.3) as cluster:
        cluster.d.go.clear()
        with pytest.raises(DeadlineExceeded, match=r"0\.3 s"):
            await cluster.client.generate(PROMPT, max_tokens=5)
        cluster.d.go.set()


async def test_the_default_deadline_holds_for_a_client_that_does_not_read(model_dir: Path) -> None:
    async with running(model_dir, default_timeout_s=0.5) as cluster:
        cluster.d.go.clear()
        stream = cluster.client.generate_stream(PROMPT, max_tokens=300)
        await stream.__anext__()
        await until(lambda: cluster.router._dispatcher.num_in_flight == 0)
        cluster.d.go.set()
        await stream.aclose()


async def test_a_full_queue_refuses_with_a_time_to_come_back(model_dir: Path) -> None:
    async with running(model_dir, max_queued_requests=4, prefill_backlog_tokens=6) as cluster:
        cluster.p.hold_token.clear()
        work = [asyncio.ensure_future(cluster.client.generate(PROMPT, max_tokens=2)) for _ in range(6)]
        await until(lambda: cluster.router._dispatcher.admission.num_waiting == 4)
        await until(lambda: cluster.p.num_prefills == 2)
        with pytest.raises(ResourceExhausted) as refused:
            await cluster.client.generate(PROMPT, max_tokens=2)
        assert refused.value.reason == "QUEUE_FULL"
        assert refused.value.retry_after_s is not None
        assert 0 < refused.value.retry_after_s <= 30
        cluster.p.hold_token.set()
        assert len(await asyncio.gather(*work)) == 6


async def test_a_burst_is_queued_or_refused_and_nothing_else(model_dir: Path) -> None:
    async with running(model_dir, num_prefills=2, num_decodes=2, max_queued_requests=100) as cluster:
        for decode in cluster.decodes:
            decode.num_blocks = 8
        answers = await asyncio.gather(
            *(cluster.client.generate([number, 1], max_tokens=4, seed=1) for number in range(200)),
            return_exceptions=True,
        )
        good = 0
        for number, answer in enumerate(answers):
            if isinstance(answer, BaseException):
                assert isinstance(answer, ResourceExhausted)
                continue
            good += 1
            assert answer.token_ids == expected([number, 1], 1, 4)
        assert good >= 100


async def test_a_burst_spreads_over_all_workers(model_dir: Path) -> None:
    async with running(model_dir, num_prefills=4, num_decodes=4) as cluster:
        prompt = [1] * 20
        await asyncio.gather(*(cluster.client.generate(prompt, max_tokens=3) for _ in range(64)))
        for counts in (
            [prefill.num_prefills for prefill in cluster.prefills],
            [decode.num_reserves for decode in cluster.decodes],
        ):
            assert sum(counts) == 64
            assert max(counts) / 16 <= 1.5


async def test_requests_wait_for_room_and_two_that_fit_one_after_the_other_both_finish(
    cluster: Cluster,
) -> None:
    cluster.d.num_blocks = 4
    cluster.d.step_s = 0.005
    prompts = [[number] * 12 for number in range(4)]
    answers = await asyncio.gather(
        *(cluster.client.generate(prompt, max_tokens=5, seed=1) for prompt in prompts)
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == expected(prompt, 1, 5)
        assert answer.completions[0].num_resumes == 0


async def test_no_room_in_time_is_resource_exhausted(model_dir: Path) -> None:
    async with running(model_dir, default_timeout_s=0.4) as cluster:
        cluster.d.num_blocks = 0
        with pytest.raises(ResourceExhausted) as refused:
            await cluster.client.generate(PROMPT, max_tokens=5)
        assert refused.value.reason == "NO_ROOM"
        assert refused.value.retry_after_s is not None
        # Asking again and again would be a load of its own.
        assert cluster.d.num_reserves < 10


async def test_who_waits_behind_one_that_found_no_room_hears_of_the_room_as_well(model_dir: Path) -> None:
    async with running(model_dir, default_timeout_s=0.4) as cluster:
        cluster.d.num_blocks, cluster.d.step_s = 1, 60.0
        has_it = asyncio.ensure_future(cluster.client.generate(PROMPT, max_tokens=5, timeout=60))
        await until(lambda: len(cluster.d.reserved) == 1)
        first = asyncio.ensure_future(cluster.client.generate(PROMPT, max_tokens=5, timeout=60))
        await until(lambda: cluster.d.num_reserves >= 3)  # and asks alone from now on
        with pytest.raises(ResourceExhausted) as refused:
            await cluster.client.generate(PROMPT, max_tokens=5)
        assert refused.value.reason == "NO_ROOM"
        assert refused.value.retry_after_s is not None
        for call in (has_it, first):
            call.cancel()
        await asyncio.gather(has_it, first, return_exceptions=True)


async def test_a_prefill_worker_without_room_costs_no_retry(cluster: Cluster) -> None:
    cluster.p.fail_always = errors.ResourceExhausted("pool full")
    work = asyncio.ensure_future(cluster.client.generate(PROMPT, max_tokens=5, seed=1))
    await until(lambda: cluster.p.num_prefills > 5)
    cluster.p.fail_always = None
    answer = await work
    assert answer.token_ids == expected(PROMPT, 1, 5)
    assert answer.completions[0].num_resumes == 0


async def test_an_empty_pool_means_waiting(cluster: Cluster) -> None:
    away, cluster.decodes[:] = list(cluster.decodes), []
    await cluster.show()
    await until(lambda: not cluster.router.table.is_serving)
    work = asyncio.ensure_future(cluster.client.generate(PROMPT, max_tokens=5, seed=1))
    await until(lambda: cluster.router._dispatcher.admission.num_waiting == 1)
    cluster.decodes[:] = away
    await cluster.show()
    assert (await work).token_ids == expected(PROMPT, 1, 5)


async def test_an_empty_pool_is_waited_for_until_the_deadline_and_then_named(model_dir: Path) -> None:
    async with running(model_dir, default_timeout_s=0.3) as cluster:
        pools = cluster.pools()
        pools[1].target = 0
        pools[1].ClearField("workers")
        await cluster.control.show(pools)
        await until(lambda: not cluster.router.table.is_serving)
        begin = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"^not done within 0\.3 s: decode is scaled to 0"):
            await cluster.client.generate(PROMPT, max_tokens=5)
        assert time.monotonic() - begin >= 0.3
        assert (cluster.p.num_prefills, cluster.d.num_reserves) == (0, 0)


async def test_a_pool_that_cannot_recover_is_unavailable_at_once(cluster: Cluster) -> None:
    cluster.decodes.clear()
    await cluster.show()
    await until(lambda: not cluster.router.table.is_serving)
    work = asyncio.ensure_future(cluster.client.generate(PROMPT, max_tokens=5))
    await until(lambda: cluster.router._dispatcher.admission.num_waiting == 1)
    pools = cluster.pools()
    pools[1].unrecoverable_reason = "model file is gone"
    await cluster.control.show(pools)
    with pytest.raises(Unavailable, match="model file is gone"):
        await work
    with pytest.raises(Unavailable):
        await cluster.client.generate(PROMPT, max_tokens=5)


@pytest.mark.parametrize("num_tokens", [MAX_SEQUENCE_TOKENS, MAX_SEQUENCE_TOKENS + 1, 2000])
async def test_what_can_never_fit_is_refused_at_once(cluster: Cluster, num_tokens: int) -> None:
    with pytest.raises(errors.InvalidArgument, match="max_tokens"):
        await cluster.client.generate([1] * num_tokens, max_tokens=1)
    assert cluster.p.num_prefills == 0


async def test_probes_answer_while_everything_is_busy(model_dir: Path) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    async with running(model_dir, max_prompt_bytes=4 << 20) as cluster:
        cluster.p.hold_token.clear()
        text = "the quick brown fox " * 100_000
        work = [asyncio.ensure_future(cluster.client.generate(PROMPT, max_tokens=2)) for _ in range(100)]
        work += [asyncio.ensure_future(cluster.client.generate(text, max_tokens=2)) for _ in range(3)]
        # The tokenizer is at work when the probes come, and still when they are answered.
        await until(lambda: cluster.router.codec._num_long_texts > 0)
        async with grpc.aio.insecure_channel(cluster.server.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for _ in range(10):
                answer = await health.Check(health_pb2.HealthCheckRequest())
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert cluster.router.codec._num_long_texts > 0
        cluster.p.hold_token.set()
        results = await asyncio.gather(*work, return_exceptions=True)
        assert sum(isinstance(result, errors.InvalidArgument) for result in results) == 3


async def test_every_request_is_told_from_received_to_finished(cluster: Cluster) -> None:
    events: list[LifetimeEvent] = []
    cluster.router.on_event(events.append)
    await cluster.client.generate(PROMPT, max_tokens=5, request_id="mine")
    moments = [event.moment for event in events]
    assert moments[:4] == [Moment.RECEIVED, Moment.QUEUED, Moment.RESERVED, Moment.PREFILL_BEGIN]
    assert moments[-1] is Moment.FINISHED
    assert sorted(moments, key=lambda each: each.value) == sorted(Moment, key=lambda each: each.value)
    assert {event.request_id for event in events} == {"mine"}
    assert len({event.transfer_id for event in events}) == 1


async def test_a_bug_is_told_as_one(cluster: Cluster) -> None:
    outcomes: list[str | None] = []

    def listen(event: LifetimeEvent) -> None:
        if event.moment is Moment.RESERVED:
            raise RuntimeError("nobody foresaw it")
        if event.moment is Moment.FINISHED:
            outcomes.append(event.outcome)

    cluster.router.on_event(listen)
    with pytest.raises(errors.Internal):
        await cluster.client.generate(PROMPT, max_tokens=5)
    assert outcomes == ["INTERNAL"]


async def test_blocks_asked_for_count_before_a_worker_reports_them(model_dir: Path) -> None:
    async with running(model_dir, num_decodes=2) as cluster:
        for decode in cluster.decodes:
            decode.hold_reserve.clear()
        work = []
        for prompt in ([1] * 200, [2], [3], [4]):
            num_before = sum(decode.num_reserves for decode in cluster.decodes)
            work.append(asyncio.ensure_future(cluster.client.generate(prompt, max_tokens=2)))
            await until(lambda n=num_before: sum(d.num_reserves for d in cluster.decodes) == n + 1)  # type: ignore[misc]
        assert sorted(decode.num_reserves for decode in cluster.decodes) == [1, 3]
        for decode in cluster.decodes:
            decode.hold_reserve.set()
        await asyncio.gather(*work)


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_router_that_stops_ends_what_takes_too_long_in_its_own_words(
    model_dir: Path, is_stream: bool
) -> None:
    async with running(model_dir) as cluster:
        cluster.d.step_s = 0.02
        heard: list[object] = []

        async def ask() -> None:
            if is_stream:
                async for event in cluster.client.generate_stream(PROMPT, max_tokens=200):
                    heard.append(event)
            else:
                await cluster.client.generate(PROMPT, max_tokens=200)

        work = asyncio.ensure_future(ask())
        await until(lambda: bool(cluster.d.reserved))
        if is_stream:
            await until(lambda: len(heard) > 3)
        await asyncio.wait_for(cluster.server.drain(0.1), 20)
        with pytest.raises(Unavailable, match=r"^the router stops$") as failed:
            await asyncio.wait_for(work, 20)
        assert failed.value.reason == "STOPPING"
        await until(cluster.is_idle)


async def test_a_deadline_that_passes_while_a_client_does_not_read_is_no_cancel(cluster: Cluster) -> None:
    outcomes: list[str | None] = []
    cluster.router.on_event(lambda event: outcomes.append(event.outcome))
    message = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=PROMPT))
    deadline = Deadline(0.5)

    async def answer() -> None:
        async with deadline, aclosing(cluster.router.generate(message, deadline)) as outputs:
            async for _ in outputs:
                with deadline.put_off():  # as the front does around each write
                    await until(lambda: deadline.has_passed)

    with pytest.raises(errors.DeadlineExceeded):
        await answer()
    assert outcomes[-1] == "DEADLINE_EXCEEDED"
