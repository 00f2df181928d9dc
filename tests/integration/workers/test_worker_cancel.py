"""Leaving at any moment gives everything back (the fixture looks at every table after each test)."""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import suppress

import grpc
import pytest

from kv_transfer.transport.memory import Faults
from pdserve.v1 import worker_pb2
from pdserve.v1.errors import PdserveError
from tests.integration.workers.mini_router import HERE, Answer, Cluster, Route, eventually, route, spec
from tests.unit.engine.driving import Reference, prompt
from worker.identity import Role

B = 16


async def test_cancel_before_any_prefill_gives_the_reservation_back(cluster: Cluster) -> None:
    decode = await cluster.decode_worker()
    decoder = await cluster.subscribe(decode)
    sequence = spec(prompt(100))
    reserved = await decoder.reserve(sequence)
    assert reserved.reservation.num_blocks == 7
    assert decode.load().num_reservations == 1
    assert await decoder.release(sequence) == 1
    assert await decoder.release(sequence) == 0
    await eventually(lambda: decode.load().kv_blocks_used == 0)


@pytest.mark.parametrize("moment", ["queued", "computing", "first token", "shipping"])
async def test_a_cancelled_prefill_frees_both_sides_at_once(cluster: Cluster, moment: str) -> None:
    gate = threading.Event()
    cluster.memory.faults = Faults(hold={1: gate} if moment == "shipping" else {})
    decode = await cluster.decode_worker(transport="memory", num_blocks=200)
    prefill = await cluster.prefill_worker(num_blocks=200, max_num_batched_tokens=16)
    way = Route(cluster.prefill_stub(prefill), await cluster.subscribe(decode))
    # Long enough that it is still there when it is looked for.
    sequence = spec(prompt({"shipping": 40, "first token": 400}.get(moment, 1500)))
    reserved = await way.decoder.reserve(sequence)
    call = way.prefill.Prefill(worker_pb2.PrefillRequest(sequence=sequence, reservation=reserved.reservation))
    await eventually(lambda: prefill.load().num_transfers == 1)
    if moment == "computing":
        await eventually(lambda: prefill.sender.bytes_sent > 0)
    elif moment != "queued":
        await call.read()
    call.cancel()
    gate.set()
    await eventually(lambda: prefill.load().num_transfers == 0 and prefill.load().kv_blocks_used == 0, 2.0)
    await eventually(lambda: prefill.load().num_running == prefill.load().num_waiting == 0)
    await way.decoder.release(sequence)
    await eventually(lambda: decode.load().kv_blocks_used == 0, 2.0)
    # The next prompt does not wait behind dead work.
    assert len((await asyncio.wait_for(way.generate(spec(prompt(9), 3)), 2.0)).ids) == 3


async def test_a_prompt_that_its_decode_worker_has_let_go_is_not_computed_to_its_end(
    cluster: Cluster,
) -> None:
    decode = await cluster.decode_worker(transport="memory", num_blocks=200)
    prefill = await cluster.prefill_worker(num_blocks=200, max_num_batched_tokens=16)
    way = Route(cluster.prefill_stub(prefill), await cluster.subscribe(decode))
    sequence = spec(prompt(2000))
    reserved = await way.decoder.reserve(sequence)
    call = way.prefill.Prefill(worker_pb2.PrefillRequest(sequence=sequence, reservation=reserved.reservation))
    await eventually(lambda: prefill.sender.bytes_sent > 0)
    await way.decoder.release(sequence)
    with pytest.raises(grpc.aio.AioRpcError):
        await call.read()
    await eventually(lambda: prefill.load().num_running == prefill.load().num_waiting == 0)
    assert prefill.describe().counters.tokens_prefilled < 2000


async def test_two_hundred_cancels_at_random_moments(cluster: Cluster, reference: Reference) -> None:
    dice = random.Random(11)
    cluster.memory.faults = Faults(delay_s=lambda _: dice.random() * 0.002)
    way = await route(cluster, "memory", num_blocks=300)
    over_grpc = await route(cluster, num_blocks=300)

    async def one(number: int) -> None:
        through = way if number % 2 else over_grpc
        task = asyncio.create_task(through.generate(spec(prompt(dice.randrange(1, 120), number), 12)))
        await asyncio.wait([task], timeout=dice.random() * 0.25)
        task.cancel()
        with suppress(asyncio.CancelledError, PdserveError):
            await task

    for batch in range(20):
        await asyncio.gather(*(one(10 * batch + i) for i in range(10)))
    for through in (way, over_grpc):
        answer = await through.generate(spec(prompt(50), 8))
        reference.assert_follows(prompt(50), answer.ids)


async def test_a_late_frame_lands_in_nobodys_blocks(cluster: Cluster, reference: Reference) -> None:
    """A is aborted with a frame under way; B reuses its blocks; then the frame comes."""
    late = threading.Event()
    cluster.memory.faults = Faults(hold={2: late})
    decode = await cluster.decode_worker(transport="memory", num_blocks=8)
    slow, quick = await cluster.prefill_worker(), await cluster.prefill_worker()
    decoder = await cluster.subscribe(decode)
    a = spec(prompt(7 * B, seed=1), 4)
    reserved = await decoder.reserve(a)
    call = cluster.prefill_stub(slow).Prefill(
        worker_pb2.PrefillRequest(sequence=a, reservation=reserved.reservation)
    )
    await call.read()
    await decoder.release(a)
    await eventually(lambda: decode.load().kv_blocks_used == 0)
    cluster.memory.faults = Faults()
    b = spec(prompt(7 * B, seed=2), 12)
    answer = Answer()
    reserved = await decoder.reserve(b)
    way = Route(cluster.prefill_stub(quick), decoder)
    await way.push(b, reserved.reservation, answer)
    late.set()
    await way.stream(b, answer)
    reference.assert_follows(prompt(7 * B, seed=2), answer.ids)
    call.cancel()
    await decoder.release(b)


async def test_release_ends_a_running_sequence(cluster: Cluster) -> None:
    decode = await cluster.decode_worker(role=Role.COLOCATED)
    decoder = await cluster.subscribe(decode)
    for mode_moment in range(3):
        sequence = spec(prompt(60), 800)
        await decoder.reserve(sequence, HERE)
        if mode_moment == 1:
            await eventually(lambda: decode.load().num_running == 1)
        elif mode_moment == 2:
            await decoder.queue((sequence.transfer_id, 0)).get()
        assert await decoder.release(sequence) == 1
        await eventually(lambda: decode.load().kv_blocks_used == 0)


async def test_a_newer_epoch_replaces_the_older_one(cluster: Cluster, reference: Reference) -> None:
    way = await route(cluster)
    older = spec(prompt(40), 400)
    await way.decoder.reserve(older)
    newer = spec(prompt(40), 6, transfer_id=older.transfer_id, epoch=1)
    answer = await way.generate(newer)
    reference.assert_follows(prompt(40), answer.ids)
    assert await way.decoder.release(older) == 0
