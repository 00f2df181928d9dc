"""What workers refuse, and that a refusal takes nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable

import pytest
from llguidance import LLMatcher

from decode_worker.config import DecodeConfig
from engine.guidance import Grammars
from pdserve.v1 import worker_pb2
from pdserve.v1.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PdserveError,
    ResourceExhausted,
)
from prefill_worker.config import PrefillConfig
from tests.integration.workers.mini_router import (
    HERE,
    RECEIVE,
    Answer,
    Cluster,
    Route,
    eventually,
    route,
    spec,
    typed,
)
from tests.unit.engine.driving import Reference, prompt
from worker.identity import Role

Reservation = worker_pb2.Reservation


def _forged(r: Reservation) -> None:
    r.transfer_id = "0" * 32


def _later(r: Reservation) -> None:
    r.epoch += 1


def _other_process(r: Reservation) -> None:
    r.instance_id = "f" * 32


def _unknown_transport(r: Reservation) -> None:
    r.ways[0].transport = "pigeon"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (_forged, NotFound),
        (_later, NotFound),
        (_other_process, FailedPrecondition),
        (_unknown_transport, FailedPrecondition),
    ],
)
async def test_a_hand_off_that_is_not_ds_gets_an_error_and_no_text(
    cluster: Cluster,
    reference: Reference,
    change: Callable[[Reservation], None],
    error: type[PdserveError],
) -> None:
    way = await route(cluster)
    sequence = spec(prompt(40), 6)
    reserved = await way.decoder.reserve(sequence)
    false = Reservation()
    false.CopyFrom(reserved.reservation)
    change(false)
    claimed = spec(prompt(40), 6, transfer_id=false.transfer_id, epoch=false.epoch)
    with pytest.raises(error):
        await way.push(claimed, false, Answer())
    # The true one still works, and only once.
    answer = Answer()
    await way.push(sequence, reserved.reservation, answer)
    await way.stream(sequence, answer)
    reference.assert_follows(prompt(40), answer.ids)
    with pytest.raises(FailedPrecondition):
        await way.push(sequence, reserved.reservation, Answer())
    with pytest.raises(FailedPrecondition):
        await way.decoder.reserve(sequence)


async def test_a_stale_epoch_is_refused(cluster: Cluster) -> None:
    way = await route(cluster)
    old = spec(prompt(20), 4)
    reserved = await way.decoder.reserve(old)
    new = spec(prompt(20), 4, transfer_id=old.transfer_id, epoch=2)
    await way.decoder.reserve(new)
    with pytest.raises(FailedPrecondition):
        await way.push(old, reserved.reservation, Answer())
    with pytest.raises(FailedPrecondition):
        await way.decoder.reserve(spec(prompt(20), 4, transfer_id=old.transfer_id, epoch=1))
    assert await way.decoder.release(new) == 1


async def test_a_prompt_whose_transfer_is_open_is_refused_and_the_first_goes_on(
    cluster: Cluster, reference: Reference
) -> None:
    """Even for another decode worker: both would write and free by the same name."""
    sequence = spec(prompt(1500), 3)
    prefill = await cluster.prefill_worker(num_blocks=200, max_num_batched_tokens=16)
    decoders = [await cluster.decode_worker(num_blocks=200) for _ in range(2)]
    first, second = [Route(cluster.prefill_stub(prefill), await cluster.subscribe(d)) for d in decoders]
    reserved = (await second.decoder.reserve(sequence)).reservation
    answer = asyncio.create_task(first.generate(sequence))
    await eventually(lambda: prefill.load().num_transfers == 1)
    with pytest.raises(FailedPrecondition) as caught:
        await second.push(sequence, reserved, Answer())
    assert caught.value.reason == "TRANSFER_OPEN"
    reference.assert_follows(prompt(1500), (await answer).ids)
    assert await second.decoder.release(sequence) == 1


async def test_the_same_reserve_again_takes_nothing_twice(cluster: Cluster) -> None:
    decode = await cluster.decode_worker()
    decoder = await cluster.subscribe(decode)
    sequence = spec(prompt(40))
    first = await decoder.reserve(sequence)
    second = await decoder.reserve(sequence)
    assert first.reservation == second.reservation
    assert decode.load().kv_blocks_used == 3
    await decoder.release(sequence)


async def test_another_routers_reservation_is_told_to_nobody_else(cluster: Cluster) -> None:
    decode = await cluster.decode_worker()
    owner, other = await cluster.subscribe(decode, "a"), await cluster.subscribe(decode, "b")
    sequence = spec(prompt(40))
    await owner.reserve(sequence)
    with pytest.raises(FailedPrecondition) as caught:
        await other.reserve(sequence)
    assert caught.value.reason == "FOREIGN_ROUTER"
    # It is whole, and its owner's.
    assert decode.load().kv_blocks_used == 3
    assert await owner.release(sequence) == 1


async def test_a_release_that_overtakes_its_reserve_keeps_it_out(cluster: Cluster) -> None:
    decoder = await cluster.subscribe(await cluster.decode_worker())
    sequence = spec(prompt(20))
    assert await decoder.release(sequence) == 0
    with pytest.raises(FailedPrecondition):
        await decoder.reserve(sequence)


async def test_reserve_needs_a_subscription_and_a_mode_that_the_role_has(cluster: Cluster) -> None:
    decoder = await cluster.subscribe(await cluster.decode_worker())
    request = worker_pb2.ReserveRequest(sequence=spec(prompt(5)), router_id="stranger", mode=RECEIVE)
    with pytest.raises(FailedPrecondition) as caught:
        await typed(decoder.stub.Reserve(request))
    assert caught.value.reason == "NO_SUBSCRIPTION"
    with pytest.raises(FailedPrecondition) as caught:
        await decoder.reserve(spec(prompt(5)), HERE)
    assert caught.value.reason == "ROLE"
    with pytest.raises(InvalidArgument):
        await decoder.reserve(spec(prompt(5)), worker_pb2.ReserveRequest.MODE_UNSPECIFIED)


async def test_what_can_never_fit_is_told_from_what_does_not_fit_now(cluster: Cluster) -> None:
    decode = await cluster.decode_worker(num_blocks=8)
    decoder = await cluster.subscribe(decode)
    with pytest.raises(InvalidArgument):
        await decoder.reserve(spec(prompt(8 * 16), 1))
    with pytest.raises(InvalidArgument):
        await decoder.reserve(spec([9999], 1))
    big, next_big = spec(prompt(90), 4), spec(prompt(90, 1), 4)
    await decoder.reserve(big)
    with pytest.raises(ResourceExhausted) as caught:
        await decoder.reserve(next_big)
    assert caught.value.retry_after_s is not None
    await decoder.release(big)
    await eventually(lambda: decode.load().kv_blocks_used == 0)
    await decoder.reserve(next_big)  # the same key: a refusal uses nothing up
    await decoder.release(next_big)


async def test_a_spec_that_no_router_sends_is_invalid(cluster: Cluster) -> None:
    way = await route(cluster)
    for spoil in (
        lambda s: s.ClearField("prompt_token_ids"),
        lambda s: s.sampling.ClearField("seed"),
        lambda s: s.stop.ClearField("max_tokens"),
        lambda s: s.ClearField("transfer_id"),
    ):
        sequence = spec(prompt(5))
        spoil(sequence)
        with pytest.raises(InvalidArgument):
            await way.decoder.reserve(sequence)
        with pytest.raises(InvalidArgument):
            await way.push(sequence, Reservation(lease_ms=1, num_blocks=1), Answer())
    assert len((await way.generate(spec(prompt(5), 2))).ids) == 2


async def test_a_reservation_of_another_size_is_invalid(cluster: Cluster) -> None:
    way = await route(cluster)
    sequence = spec(prompt(40))
    reserved = await way.decoder.reserve(sequence)
    longer = spec(prompt(80), transfer_id=sequence.transfer_id)
    with pytest.raises(InvalidArgument):
        await way.push(longer, reserved.reservation, Answer())
    await way.decoder.release(sequence)


async def test_both_backlogs_are_bounded(cluster: Cluster) -> None:
    prefill = await cluster.prefill_worker(PrefillConfig(max_num_prefills=0))
    decode = await cluster.decode_worker(DecodeConfig(max_num_waiting=0), role=Role.COLOCATED)
    way = Route(cluster.prefill_stub(prefill), await cluster.subscribe(decode))
    sequence = spec(prompt(5))
    reserved = await way.decoder.reserve(sequence)
    with pytest.raises(ResourceExhausted):
        await way.push(sequence, reserved.reservation, Answer())
    with pytest.raises(ResourceExhausted):
        await way.decoder.reserve(spec(prompt(5)), HERE)
    await way.decoder.release(sequence)


def test_the_settings_are_values() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        DecodeConfig().lease_s = 1.0  # type: ignore[misc]


def constrained(regex: str) -> worker_pb2.SequenceSpec:
    made = spec(prompt(20), 4)
    made.sampling.structured.regex = regex
    return made


@pytest.mark.parametrize(
    ("regex", "known", "complaint"), [("(", (), "unclosed group"), ("abc", (64, 66), "known output")]
)
async def test_a_grammar_that_cannot_be_honoured_takes_nothing(
    cluster: Cluster, regex: str, known: tuple[int, ...], complaint: str
) -> None:
    """No router lets one through; each role refuses it by itself."""
    way = await route(cluster)
    sequence, free = constrained(regex), spec(prompt(20), 4)
    for each in (sequence, free):
        each.known_token_ids.extend(known)
    with pytest.raises(InvalidArgument, match=complaint):
        await way.decoder.reserve(sequence)
    reserved = await way.decoder.reserve(free)
    sequence.transfer_id = free.transfer_id
    with pytest.raises(InvalidArgument, match=complaint):
        await way.push(sequence, reserved.reservation, Answer())
    assert await way.decoder.release(free) == 1


async def test_a_release_overtakes_a_reserve_that_waits_for_its_grammar(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, begun, compile_one = threading.Event(), threading.Event(), Grammars.matcher

    def gated(self: Grammars, text: str) -> LLMatcher:
        begun.set()
        if not gate.wait(20):
            raise TimeoutError
        return compile_one(self, text)

    monkeypatch.setattr(Grammars, "matcher", gated)
    decode = await cluster.decode_worker()
    decoder = await cluster.subscribe(decode)
    sequence = constrained("a+")
    reserving = asyncio.create_task(decoder.reserve(sequence))
    await eventually(begun.is_set)
    assert await decoder.release(sequence) == 0
    gate.set()
    with pytest.raises(FailedPrecondition):
        await reserving
    assert decode.load().kv_blocks_used == 0
