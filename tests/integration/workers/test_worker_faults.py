"""One side fails: the other has given back what it held within a second, and everybody has a typed error."""

from __future__ import annotations

import asyncio
import threading
import time

import grpc
import pytest

from decode_worker.config import DecodeConfig
from engine.config import EngineConfig
from engine.engine import Engine
from engine.loop import EngineLoop
from kv_transfer import codec
from kv_transfer.send_queue import SenderConfig
from kv_transfer.transport.memory import Faults
from pdserve.v1 import worker_pb2, worker_pb2_grpc
from pdserve.v1.errors import (
    Aborted,
    DataLoss,
    FailedPrecondition,
    Internal,
    PdserveError,
    ResourceExhausted,
    Unavailable,
)
from prefill_worker.config import PrefillConfig
from tests.integration.workers.conftest import MakeLoop
from tests.integration.workers.mini_router import Answer, Cluster, Route, eventually, route, spec, typed
from tests.trusted import TRUST
from tests.unit.engine.driving import Reference, prompt
from trust.channels import open_aio_channel

B = 16


async def failure_of(way: Route, sequence: worker_pb2.SequenceSpec) -> PdserveError:
    """What D tells the router about a sequence."""
    output = await asyncio.wait_for(way.decoder.queue((sequence.transfer_id, sequence.epoch)).get(), 5)
    assert isinstance(output, PdserveError), output
    return output


@pytest.mark.parametrize("forged", [512, 2**32 - 1])
async def test_a_commit_with_a_token_that_there_is_not_fails_its_own_request_only(
    cluster: Cluster, reference: Reference, monkeypatch: pytest.MonkeyPatch, forged: int
) -> None:
    way = await route(cluster)
    neighbour = spec(prompt(30), 500)
    going_on = asyncio.create_task(way.generate(neighbour))
    await way.decoder.seen((neighbour.transfer_id, 0))
    monkeypatch.setattr(codec, "_pack_token", lambda first: [first.position, forged, []])
    with pytest.raises(Internal, match="outside the vocabulary"):
        await way.generate(spec(prompt(40), 6))
    monkeypatch.undo()
    assert len((await way.generate(spec(prompt(40), 3))).ids) == 3
    reference.assert_follows(prompt(30), (await going_on).ids)


@pytest.mark.parametrize("frame", [1, 2])
async def test_damaged_kv_is_data_loss_on_both_sides_and_a_new_epoch_works(
    cluster: Cluster, reference: Reference, frame: int
) -> None:
    cluster.memory.faults = Faults(corrupt=frozenset({frame}))
    decode = await cluster.decode_worker(transport="memory")
    prefill = await cluster.prefill_worker(PrefillConfig(sender=SenderConfig(frame_bytes=1)))
    way = Route(cluster.prefill_stub(prefill), await cluster.subscribe(decode))
    sequence = spec(prompt(60), 6)
    reserved = await way.decoder.reserve(sequence)
    with pytest.raises(DataLoss):
        await way.push(sequence, reserved.reservation, Answer())
    assert isinstance(await failure_of(way, sequence), DataLoss)
    await eventually(lambda: decode.load().kv_blocks_used == 0, 1.0)
    again = await way.generate(spec(prompt(60), 6, transfer_id=sequence.transfer_id, epoch=1))
    reference.assert_follows(prompt(60), again.ids)


async def test_a_prompt_that_breaks_on_p_ends_ds_reservation_within_a_second(
    cluster: Cluster, make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make_loop()
    decode = await cluster.decode_worker()
    prefill = await cluster.prefill_worker(loop=loop)
    way = Route(cluster.prefill_stub(prefill), await cluster.subscribe(decode))

    def broken(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(Engine, "_compute", broken)
    sequence = spec(prompt(60))
    reserved = await way.decoder.reserve(sequence)
    began = time.monotonic()
    with pytest.raises(Internal):
        await way.push(sequence, reserved.reservation, Answer())
    await eventually(lambda: decode.load().kv_blocks_used == 0, 1.0)
    assert time.monotonic() - began < 1.0
    monkeypatch.undo()
    assert len((await way.generate(spec(prompt(60), 3))).ids) == 3


async def test_a_broken_step_on_d_ends_its_sequences_with_an_error(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = await route(cluster)
    sequence = spec(prompt(20), 500)
    task = asyncio.create_task(way.generate(sequence))
    await way.decoder.seen((sequence.transfer_id, 0))

    def broken(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(Engine, "_compute", broken)
    with pytest.raises(Internal):
        await task


async def test_p_stopped_in_the_middle_is_unavailable_and_d_is_clean_within_a_second(
    cluster: Cluster,
) -> None:
    gate = threading.Event()
    cluster.memory.faults = Faults(hold={2: gate})
    decode = await cluster.decode_worker(transport="memory")
    prefill = await cluster.prefill_worker(PrefillConfig(sender=SenderConfig(frame_bytes=1)))
    way = Route(cluster.prefill_stub(prefill), await cluster.subscribe(decode))
    sequence = spec(prompt(60))
    reserved = await way.decoder.reserve(sequence)
    task = asyncio.create_task(way.push(sequence, reserved.reservation, Answer()))
    await eventually(lambda: decode.describe().counters.kv_bytes_received > 0)
    await asyncio.wait_for(prefill.stop(), 5)
    with pytest.raises(Unavailable):
        await task
    await eventually(lambda: decode.load().kv_blocks_used == 0, 1.0)


async def test_d_stopped_in_the_middle_is_unavailable_for_p_and_router(cluster: Cluster) -> None:
    decode = await cluster.decode_worker()
    prefill = await cluster.prefill_worker(max_num_batched_tokens=4, num_blocks=200)
    way = Route(cluster.prefill_stub(prefill), await cluster.subscribe(decode))
    sequence = spec(prompt(900))
    reserved = await way.decoder.reserve(sequence)
    task = asyncio.create_task(way.push(sequence, reserved.reservation, Answer()))
    await eventually(lambda: decode.describe().counters.kv_bytes_received > 0)
    began = time.monotonic()
    await asyncio.wait_for(decode.stop(), 5)
    with pytest.raises((Unavailable, Aborted, FailedPrecondition)):
        await task
    assert isinstance(await failure_of(way, sequence), Unavailable)
    await eventually(lambda: way.decoder.error is not None)
    assert isinstance(way.decoder.error, Unavailable)
    await eventually(lambda: prefill.load().kv_blocks_used == 0, 1.0)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("frame", [0, 1, 2, 3])
async def test_a_connection_that_dies_at_any_frame_costs_one_attempt(
    cluster: Cluster, reference: Reference, frame: int
) -> None:
    cluster.memory.faults = Faults(kill_at=frame)
    decode = await cluster.decode_worker(transport="memory")
    prefill = await cluster.prefill_worker(PrefillConfig(sender=SenderConfig(frame_bytes=1)))
    way = Route(cluster.prefill_stub(prefill), await cluster.subscribe(decode))
    with pytest.raises(Unavailable):
        await way.generate(spec(prompt(2 * B), 6))
    await eventually(lambda: decode.load().kv_blocks_used == 0, 1.0)
    cluster.memory.faults = Faults()
    answer = await way.generate(spec(prompt(2 * B), 6))
    reference.assert_follows(prompt(2 * B), answer.ids)


async def test_p_dead_between_commit_and_answer_loses_no_token(
    cluster: Cluster, reference: Reference
) -> None:
    way = await route(cluster)
    sequence = spec(prompt(30), 10)
    reserved = await way.decoder.reserve(sequence)
    call = way.prefill.Prefill(worker_pb2.PrefillRequest(sequence=sequence, reservation=reserved.reservation))
    await call.wait_for_connection()
    queue = way.decoder.queue((sequence.transfer_id, 0))
    first = await asyncio.wait_for(queue.get(), 5)  # D has it; nothing was read from P
    call.cancel()
    answer = Answer()
    assert not isinstance(first, PdserveError)
    answer.take(first)
    await way.stream(sequence, answer)
    reference.assert_follows(prompt(30), answer.ids)


async def test_a_reservation_that_no_prompt_comes_for_expires_with_a_clear_error(cluster: Cluster) -> None:
    decode = await cluster.decode_worker(DecodeConfig(lease_s=0.2))
    prefill = await cluster.prefill_worker()
    way = Route(cluster.prefill_stub(prefill), await cluster.subscribe(decode))
    sequence = spec(prompt(40))
    reserved = await way.decoder.reserve(sequence)
    error = await failure_of(way, sequence)
    assert isinstance(error, Unavailable)
    assert "0.2 s" in error.message
    assert decode.describe().counters.num_expired_leases == 1
    await eventually(lambda: decode.load().kv_blocks_used == 0, 1.0)
    with pytest.raises(FailedPrecondition):
        await way.push(sequence, reserved.reservation, Answer())


async def test_a_lease_shorter_than_the_prompt_is_kept_alive_by_p(
    cluster: Cluster, reference: Reference, make_loop: MakeLoop
) -> None:
    loop = make_loop()
    decode = await cluster.decode_worker(DecodeConfig(lease_s=0.3))
    prefill = await cluster.prefill_worker(loop=loop)
    way = Route(cluster.prefill_stub(prefill), await cluster.subscribe(decode))
    busy = threading.Event()
    loop.call(lambda _: busy.wait(1.0))  # the engine does something else for three leases
    answer = await way.generate(spec(prompt(40), 4))
    reference.assert_follows(prompt(40), answer.ids)
    assert decode.describe().counters.num_expired_leases == 0


async def test_a_broken_subscribe_ends_its_own_routers_sequences_only(cluster: Cluster) -> None:
    decode = await cluster.decode_worker(num_blocks=200)
    prefill = await cluster.prefill_worker()
    stub = cluster.prefill_stub(prefill)
    lost, other = await cluster.subscribe(decode, "lost"), await cluster.subscribe(decode, "other")
    running = spec(prompt(20), 1000)
    answer = Answer()
    reserved = await lost.reserve(running)
    await Route(stub, lost).push(running, reserved.reservation, answer)
    await lost.reserve(spec(prompt(90, 1)))
    untouched = asyncio.create_task(Route(stub, other).generate(spec(prompt(20, 2), 60)))
    await lost.close()
    assert len((await untouched).ids) == 60
    await eventually(lambda: decode.load().kv_blocks_used == 0 and decode.load().num_running == 0, 1.0)
    other.router_id = "lost"
    with pytest.raises(FailedPrecondition):
        await other.reserve(spec(prompt(5)))


async def test_a_second_subscribe_of_a_router_ends_the_first(cluster: Cluster) -> None:
    decode = await cluster.decode_worker()
    first = await cluster.subscribe(decode)
    await first.reserve(spec(prompt(40)))
    second = await cluster.subscribe(decode)
    await eventually(lambda: first.error is not None)
    assert isinstance(first.error, Aborted)
    await eventually(lambda: decode.load().kv_blocks_used == 0, 1.0)
    held = spec(prompt(40, 1))
    await second.reserve(held)
    assert await second.release(held) == 1


async def test_a_router_that_does_not_read_is_cut_off_and_delays_nobody(cluster: Cluster) -> None:
    decode = await cluster.decode_worker(DecodeConfig(max_pending_steps=8), num_blocks=400)
    prefill = await cluster.prefill_worker(num_blocks=400)
    stub = cluster.prefill_stub(prefill)
    good = await cluster.subscribe(decode, "good")
    options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    async with open_aio_channel(decode.address, TRUST, options) as channel:
        deaf_stub = worker_pb2_grpc.DecodeWorkerStub(channel)
        deaf = deaf_stub.Subscribe(worker_pb2.SubscribeRequest(router_id="deaf"))
        await deaf.read()
        for number in range(30):
            sequence = spec(prompt(20, number), 1900, logprobs=20)
            request = worker_pb2.ReserveRequest(sequence=sequence, router_id="deaf", mode=1)
            try:
                reserved = await typed(deaf_stub.Reserve(request))
                await Route(stub, good).push(sequence, reserved.reservation, Answer())
            except (FailedPrecondition, Aborted):
                break  # cut off
        await eventually(lambda: decode.load().num_running == 0, 60)
        answer = await asyncio.wait_for(Route(stub, good).generate(spec(prompt(33), 5)), 10)
        assert len(answer.ids) == 5
        with pytest.raises(ResourceExhausted):
            await typed(read_all(deaf))


async def read_all(call: grpc.aio.UnaryStreamCall[object, object]) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_an_engine_that_fails_for_good_ends_everything_with_unavailable(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops: list[EngineLoop] = []

    def own_loop(model: object) -> EngineLoop:
        loop = EngineLoop(Engine(model, EngineConfig(num_blocks=64)))  # type: ignore[arg-type]
        loop.start()
        loops.append(loop)
        return loop

    decode = await cluster.decode_worker()
    model = decode._loop.engine.model
    prefill = await cluster.prefill_worker(loop=own_loop(model))
    way = Route(cluster.prefill_stub(prefill), await cluster.subscribe(decode))

    def bug(*_: object) -> None:
        raise RuntimeError("a bug in the scheduler")

    monkeypatch.setattr(loops[0].engine, "step", bug)
    with pytest.raises(Unavailable):
        await way.generate(spec(prompt(20), 5))
    await eventually(lambda: loops[0].failure is not None)
    assert "a bug in the scheduler" in prefill.describe().detail
    with pytest.raises(Unavailable):
        await way.generate(spec(prompt(20), 5))
    await eventually(lambda: decode.load().kv_blocks_used == 0, 1.0)
