"""Leaving at any moment gives everything back (the fixture looks at every table after each test)."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc
import pytest

from engine.loop import EngineLoop
from kv_transfer.transfer import PushTarget, Transfer
from kv_transfer.transport.memory import Faults
from pdserve.v1 import worker_pb2
from pdserve.v1.errors import PdserveError
from prefill_worker.config import PrefillConfig
from tests.integration.workers.conftest import MakeLoop
from tests.integration.workers.mini_router import HERE, Answer, Cluster, Route, eventually, route, spec
from tests.unit.engine.driving import Reference, prompt
from worker.engine_calls import run_on_engine
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


async def test_a_newer_epoch_ends_an_older_one_that_runs(cluster: Cluster, reference: Reference) -> None:
    decode = await cluster.decode_worker(num_blocks=200)
    prefill = await cluster.prefill_worker(num_blocks=200)
    way = Route(cluster.prefill_stub(prefill), await cluster.subscribe(decode))
    older = spec(prompt(40), 1500)
    reserved = await way.decoder.reserve(older)
    await way.push(older, reserved.reservation, Answer())
    await way.decoder.seen((older.transfer_id, 0))
    newer = spec(prompt(40), 6, transfer_id=older.transfer_id, epoch=1)
    await way.decoder.reserve(newer)
    assert await way.decoder.release(older) == 0
    reference.assert_follows(prompt(40), (await way.generate(newer)).ids)
    await eventually(lambda: decode.load().kv_blocks_used == 0)


@asynccontextmanager
async def busy(loop: EngineLoop) -> AsyncIterator[None]:
    """The engine's thread takes no call until the end, and then has taken all that were made meanwhile."""
    gate = threading.Event()
    loop.call(lambda _: gate.wait(20))
    try:
        yield
    finally:
        gate.set()
        await asyncio.wrap_future(loop.call(lambda _: None))


async def test_a_reserve_cancelled_before_the_engine_took_its_blocks_holds_none(cluster: Cluster) -> None:
    decode = await cluster.decode_worker()
    decoder = await cluster.subscribe(decode)
    sequence = spec(prompt(40))
    admissions = decode._sequences._admissions
    async with busy(decode._loop):
        call = asyncio.create_task(decoder.reserve(sequence))
        await eventually(lambda: len(admissions.all()) == 1)
        call.cancel()
        await eventually(lambda: not admissions.all())
    await eventually(lambda: decode.load().kv_blocks_used == 0)
    assert await decoder.release(sequence) == 0


async def test_what_the_engine_was_told_by_a_caller_that_left_is_done(make_loop: MakeLoop) -> None:
    """Or what undoes it later would undo nothing."""
    loop, done = make_loop(), list[int]()
    async with busy(loop):
        call = asyncio.create_task(run_on_engine(loop, lambda _: done.append(1)))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert done == [1]


async def test_a_prompt_whose_transfer_has_ended_before_it_begins_is_not_computed(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = await cluster.prefill_worker(PrefillConfig(connect_timeout_s=0.2))
    way = Route(cluster.prefill_stub(prefill), await cluster.subscribe(await cluster.decode_worker()))
    open_one = prefill.sender.open

    def open_and_fail(target: PushTarget) -> Transfer:
        transfer = open_one(target)
        assert isinstance(transfer.done.exception(20), PdserveError)
        return transfer

    monkeypatch.setattr(prefill.sender, "open", open_and_fail)
    sequence = spec(prompt(40))
    nowhere = (await way.decoder.reserve(sequence)).reservation
    nowhere.ways[0].address = "127.0.0.1:1"
    with pytest.raises(PdserveError):
        await way.push(sequence, nowhere, Answer())
    await asyncio.wrap_future(prefill._loop.call(lambda engine: engine.check_integrity()))
    load = prefill.load()
    assert (load.num_running, load.num_waiting, load.num_transfers) == (0, 0, 0)
    assert prefill.describe().counters.tokens_prefilled == 0
    assert await way.decoder.release(sequence) == 1
