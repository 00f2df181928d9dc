"""Start, drain, stop, and one role after the other on the same engine."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from decode_worker.worker import DecodeWorker
from engine.loop import EngineLoop
from engine.request import SequenceRequest
from kv_transfer.send_queue import SenderConfig
from kv_transfer.transport.memory import Faults
from pdserve.v1 import cluster_pb2, worker_pb2, worker_pb2_grpc
from pdserve.v1.errors import FailedPrecondition, Unavailable
from prefill_worker.config import PrefillConfig
from prefill_worker.worker import PrefillWorker
from tests.integration.workers.conftest import MakeLoop
from tests.integration.workers.mini_router import HERE, Answer, Cluster, Route, eventually, spec
from tests.trusted import TRUST
from tests.unit.engine.driving import Reference, prompt
from trust.channels import open_aio_channel
from worker.identity import Role

SERVING = health_pb2.HealthCheckResponse.SERVING
# For what takes a moment, however busy the machine.
BACKSTOP_S = 30


async def test_a_draining_p_waits_for_kv_that_is_not_acknowledged(
    cluster: Cluster, reference: Reference
) -> None:
    gate = threading.Event()
    cluster.memory.faults = Faults(hold={3: gate})
    decode = await cluster.decode_worker(transport="memory")
    prefill = await cluster.prefill_worker(PrefillConfig(sender=SenderConfig(frame_bytes=1)))
    way = Route(cluster.prefill_stub(prefill), await cluster.subscribe(decode))
    sequence = spec(prompt(60), 6)
    answer = Answer()
    reserved = await way.decoder.reserve(sequence)
    pushing = asyncio.create_task(way.push(sequence, reserved.reservation, answer))
    await eventually(lambda: bool(answer.tokens))  # the prompt is done, its KV is not away
    draining = asyncio.create_task(prefill.drain())
    await asyncio.wait([draining], timeout=0.3)
    assert not draining.done()
    assert prefill.describe().state == cluster_pb2.WORKER_STATE_DRAINING
    refused = spec(prompt(5))
    other = await way.decoder.reserve(refused)
    with pytest.raises(Unavailable) as caught:
        await way.push(refused, other.reservation, Answer())
    assert caught.value.reason == "DRAINING"
    await way.decoder.release(refused)
    gate.set()
    await asyncio.wait_for(draining, BACKSTOP_S)
    await pushing
    await way.stream(sequence, answer)
    reference.assert_follows(prompt(60), answer.ids)


async def test_a_draining_d_finishes_what_it_has_and_refuses_the_rest(cluster: Cluster) -> None:
    decode = await cluster.decode_worker()
    prefill = await cluster.prefill_worker()
    way = Route(cluster.prefill_stub(prefill), await cluster.subscribe(decode))
    sequence = spec(prompt(20), 150)
    task = asyncio.create_task(way.generate(sequence))
    await eventually(lambda: decode.load().num_running == 1)
    reserved_before = spec(prompt(50), 5)
    reserved = await way.decoder.reserve(reserved_before)
    draining = asyncio.create_task(decode.drain())
    await eventually(lambda: decode.describe().state == cluster_pb2.WORKER_STATE_DRAINING)
    with pytest.raises(Unavailable) as caught:
        await way.decoder.reserve(spec(prompt(5)))
    assert caught.value.reason == "DRAINING"
    assert len((await task).ids) == 150
    assert not draining.done()
    answer = Answer()
    await way.push(reserved_before, reserved.reservation, answer)
    await way.stream(reserved_before, answer)
    assert len(answer.ids) == 5
    await asyncio.wait_for(draining, BACKSTOP_S)


async def test_stop_is_bounded_and_may_come_twice(cluster: Cluster) -> None:
    decode = await cluster.decode_worker(num_blocks=200)
    prefill = await cluster.prefill_worker(num_blocks=200)
    way = Route(cluster.prefill_stub(prefill), await cluster.subscribe(decode))
    sequences = [spec(prompt(100, i), 400) for i in range(6)]
    tasks = [asyncio.create_task(way.generate(sequence)) for sequence in sequences]
    await way.decoder.seen((sequences[0].transfer_id, 0))
    began = time.monotonic()
    await asyncio.gather(prefill.stop(), decode.stop())
    assert time.monotonic() - began < BACKSTOP_S
    await asyncio.gather(prefill.stop(), decode.stop())
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(end) for end in ends} <= {Unavailable, FailedPrecondition}, ends


async def test_the_engine_outlives_its_roles(
    cluster: Cluster, make_loop: MakeLoop, reference: Reference
) -> None:
    """One engine decodes, then prefills, then does both; weights and pool stay in place."""
    loop = make_loop()
    pool = loop.engine.pool
    other_prefill = await cluster.prefill_worker()
    decode = await cluster.decode_worker(loop=loop)
    way = Route(cluster.prefill_stub(other_prefill), await cluster.subscribe(decode))
    reference.assert_follows(prompt(40), (await way.generate(spec(prompt(40), 5))).ids)
    await decode.drain()
    await decode.stop()

    prefill = await cluster.prefill_worker(loop=loop)
    way = await _way_to_new_decoder(cluster, prefill)
    answer = await way.generate(spec(prompt(40), 5))
    reference.assert_follows(prompt(40), answer.ids)
    assert answer.first is not None
    assert answer.first.prefill.cached_tokens == 32  # found what came in for the role before
    await prefill.drain()
    await prefill.stop()

    colocated = await cluster.decode_worker(loop=loop, role=Role.COLOCATED)
    decoder = await cluster.subscribe(colocated)
    sequence = spec(prompt(40), 5)
    await decoder.reserve(sequence, HERE)
    answer = Answer()
    await Route(way.prefill, decoder).stream(sequence, answer)
    reference.assert_follows(prompt(40), answer.ids)
    assert loop.engine.pool is pool


async def _way_to_new_decoder(cluster: Cluster, prefill: PrefillWorker) -> Route:
    return Route(cluster.prefill_stub(prefill), await cluster.subscribe(await cluster.decode_worker()))


async def test_neither_worker_keeps_a_prompt_whose_answer_is_over(cluster: Cluster) -> None:
    """Not even as garbage in a circle, which many prompts may pile up before Python looks for it."""
    way = Route(
        cluster.prefill_stub(await cluster.prefill_worker()),
        await cluster.subscribe(await cluster.decode_worker()),
    )

    def num_kept() -> int:
        return sum(type(each) is SequenceRequest for each in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = num_kept()
        for number in range(8):
            await way.generate(spec(prompt(40, number), 3))
        # A thread that sleeps still has its last call at hand.
        await eventually(lambda: num_kept() - before <= 2, timeout_s=5.0)
    finally:
        gc.enable()


async def test_health_and_describe_answer_while_both_workers_are_saturated(cluster: Cluster) -> None:
    decode = await cluster.decode_worker(num_blocks=4000)
    prefill = await cluster.prefill_worker(num_blocks=4000)
    way = Route(cluster.prefill_stub(prefill), await cluster.subscribe(decode))
    load = [asyncio.create_task(way.generate(spec(prompt(300, i), 1700))) for i in range(30)]
    waits: list[float] = []
    for worker in (prefill, decode):
        async with open_aio_channel(worker.address, TRUST) as channel:
            health, describe = health_pb2_grpc.HealthStub(channel), worker_pb2_grpc.WorkerStub(channel)
            await channel.channel_ready()
            for _ in range(15):
                began = time.monotonic()
                assert (await health.Check(health_pb2.HealthCheckRequest())).status == SERVING
                status = (await describe.Describe(worker_pb2.DescribeRequest())).status
                waits.append(time.monotonic() - began)
                assert status.instance_id == worker.identity.instance_id
                await asyncio.sleep(0.1)  # ten times a second
    assert not all(task.done() for task in load)
    # Test, router and two workers share one process here, and the machine with others.
    assert max(waits) < BACKSTOP_S
    for task in load:
        task.cancel()
    await asyncio.wait(load)


async def test_draining_shows_in_health(cluster: Cluster) -> None:
    for worker in (await cluster.prefill_worker(), await cluster.decode_worker()):
        await worker.drain()
        async with open_aio_channel(worker.address, TRUST) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_status_says_who_and_what_a_worker_is(cluster: Cluster) -> None:
    for worker, role in (
        (await cluster.prefill_worker(), cluster_pb2.ROLE_PREFILL),
        (await cluster.decode_worker(), cluster_pb2.ROLE_DECODE),
        (await cluster.decode_worker(role=Role.COLOCATED), cluster_pb2.ROLE_COLOCATED),
    ):
        status = worker.describe()
        assert (status.role, status.state) == (role, cluster_pb2.WORKER_STATE_READY)
        assert status.address == worker.address
        assert status.device == "cpu"
        assert status.pid > 0
        assert status.limits.layout.dtype == "float32"
        assert status.limits.kv_blocks_total == status.load.kv_blocks_free == 64
        assert status.limits.max_sequence_tokens == 64 * 16


async def fail_to_start(loop: EngineLoop, port: int) -> None:
    """Either role, one after the other on the same engine."""
    for kind in (PrefillWorker, DecodeWorker):
        worker = kind("w", loop, TRUST, port=port)
        with pytest.raises(RuntimeError, match=str(port)):
            await worker.start()
        await worker.stop()


async def test_a_taken_port_fails_the_start_and_leaves_the_engine_free(
    make_loop: MakeLoop, taken_port: int
) -> None:
    await fail_to_start(make_loop(), taken_port)


async def test_another_workers_port_is_no_less_taken(make_loop: MakeLoop) -> None:
    """Two that listen at one port would each get some of the other's calls."""
    first = PrefillWorker("first", make_loop(), TRUST)
    port = int((await first.start()).rpartition(":")[2])
    await fail_to_start(make_loop(), port)
    await first.stop()


async def test_a_prompt_that_comes_in_the_middle_of_a_step_is_queued_till_its_end(
    cluster: Cluster, make_loop: MakeLoop
) -> None:
    decode = await cluster.decode_worker(transport="memory")
    loop = make_loop()
    prefill = await cluster.prefill_worker(loop=loop)
    way = Route(cluster.prefill_stub(prefill), await cluster.subscribe(decode))
    over = threading.Event()
    loop.call(lambda _: over.wait(BACKSTOP_S))  # the engine's thread is as busy as in a step
    asking = asyncio.create_task(way.generate(spec(prompt(20), 2)))
    await eventually(lambda: prefill.load().num_transfers == 1)
    await asyncio.sleep(0.3)
    over.set()
    answer = await asyncio.wait_for(asking, BACKSTOP_S)
    assert answer.first is not None
    assert answer.first.prefill.queue_ms >= 300
