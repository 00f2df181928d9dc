"""1P1D gives the tokens that the model gives: over every transport, at every length, alone and in a crowd."""

from __future__ import annotations

import asyncio
import random

import pytest

from decode_worker.config import DecodeConfig
from engine.sampling import SamplingParams
from kv_transfer.send_queue import SenderConfig
from kv_transfer.transport.memory import Faults
from kv_transfer.verify import Verify
from pdserve.v1 import generation_pb2
from pdserve.v1.errors import FailedPrecondition
from prefill_worker.config import PrefillConfig
from tests.integration.workers.mini_router import HERE, Answer, Cluster, Decoder, Route, route, spec
from tests.unit.engine.driving import Reference, prompt
from worker.identity import Role

B = 16


@pytest.mark.parametrize("transport", ["grpc", "memory", "shm"])
@pytest.mark.parametrize("length", [1, 2, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1, 3 * B, 200])
async def test_tokens_are_the_models(
    cluster: Cluster, reference: Reference, transport: str, length: int
) -> None:
    way = await route(cluster, transport)
    for _ in range(2):  # cold, then with both prefix caches warm
        answer = await way.generate(spec(prompt(length), 12))
        assert len(answer.ids) == 12
        assert answer.finish_reason == generation_pb2.FINISH_REASON_LENGTH
        reference.assert_follows(prompt(length), answer.ids)


@pytest.mark.parametrize("verify", list(Verify))
async def test_tokens_are_the_models_however_much_is_checked(
    cluster: Cluster, reference: Reference, verify: Verify
) -> None:
    decode = await cluster.decode_worker(DecodeConfig(verify=verify))
    sender = SenderConfig(verify=verify)
    prefill = await cluster.prefill_worker(PrefillConfig(min_group_bytes=1, sender=sender))
    way = Route(cluster.prefill_stub(prefill), await cluster.subscribe(decode))
    answer = await way.generate(spec(prompt(5 * B + 3), 12))
    reference.assert_follows(prompt(5 * B + 3), answer.ids)


async def test_a_decode_worker_takes_nothing_that_is_checked_less_than_it_demands(cluster: Cluster) -> None:
    decode = await cluster.decode_worker(DecodeConfig(verify=Verify.FULL))
    prefill = await cluster.prefill_worker(PrefillConfig(sender=SenderConfig(verify=Verify.CHECKSUM)))
    way = Route(cluster.prefill_stub(prefill), await cluster.subscribe(decode))
    with pytest.raises(FailedPrecondition, match="verify is checksum there, full here"):
        await way.generate(spec(prompt(20), 12))


async def test_prefix_blocks_that_d_holds_are_not_shipped(cluster: Cluster) -> None:
    way = await route(cluster)
    cold = await way.generate(spec(prompt(3 * B + 5), 4))
    warm = await way.generate(spec(prompt(3 * B + 5), 4))
    assert cold.ids == warm.ids
    assert cold.end is not None
    assert warm.end is not None
    assert cold.end.num_blocks == 4
    assert warm.end.num_blocks == 1
    assert warm.end.transfer_bytes * 4 == cold.end.transfer_bytes
    assert cold.first is not None
    assert warm.first is not None
    assert cold.first.prefill.cached_tokens == 0
    assert warm.first.prefill.cached_tokens == 3 * B


async def test_a_prefix_held_by_one_side_only_still_gives_the_models_tokens(
    cluster: Cluster, reference: Reference
) -> None:
    first, second = await route(cluster), await route(cluster)
    await first.generate(spec(prompt(4 * B), 4))
    for way in (Route(first.prefill, second.decoder), Route(second.prefill, first.decoder)):
        answer = await way.generate(spec(prompt(4 * B), 6))
        reference.assert_follows(prompt(4 * B), answer.ids)


async def test_fifty_at_once_with_random_delays_do_not_mix(cluster: Cluster, reference: Reference) -> None:
    dice = random.Random(5)
    cluster.memory.faults = Faults(delay_s=lambda _: dice.random() * 0.004)
    way = await route(cluster, "memory", num_blocks=400, max_num_batched_tokens=64)
    prompts = [prompt(dice.randrange(1, 70), seed=i) for i in range(50)]
    answers = await asyncio.gather(*(way.generate(spec(p, 6)) for p in prompts))
    for ids, answer in zip(prompts, answers, strict=True):
        assert len(answer.ids) == 6
        reference.assert_follows(ids, answer.ids)


async def test_a_seeded_sample_is_the_same_through_both_paths(cluster: Cluster, reference: Reference) -> None:
    sampling = SamplingParams(temperature=0.8, seed=1234)
    way = await route(cluster)
    colocated = await cluster.subscribe(await cluster.decode_worker(role=Role.COLOCATED))
    here = await run_here(colocated, spec(prompt(40), 20, sampling=sampling))
    apart = await way.generate(spec(prompt(40), 20, sampling=sampling))
    reference.assert_follows(prompt(40), apart.ids, sampling)
    reference.assert_follows(prompt(40), here.ids, sampling)
    assert here.first is not None
    assert here.first.prefill.prefill_ms > 0


async def test_a_resumed_request_goes_on_where_it_was(cluster: Cluster, reference: Reference) -> None:
    way = await route(cluster)
    sampling = SamplingParams(temperature=0.9, seed=7)
    for num_known in (1, 5, B, B + 3):
        whole = await way.generate(spec(prompt(21), 24, sampling=sampling))
        known = whole.ids[:num_known]
        resumed = await way.generate(spec(prompt(21), 24, known=known, sampling=sampling))
        assert min(resumed.tokens) == num_known
        reference.assert_follows(prompt(21), [*known, *resumed.ids], sampling)


async def test_a_sequence_that_token_zero_ends_ships_nothing_more(cluster: Cluster) -> None:
    way = await route(cluster)
    whole = await way.generate(spec(prompt(30), 4))
    one = await way.generate(spec(prompt(30), 1))
    assert one.ids == whole.ids[:1]
    assert one.finish_reason == generation_pb2.FINISH_REASON_LENGTH
    stopped = await way.generate(spec(prompt(30), 9, stop_token_ids=whole.ids[:1]))
    assert stopped.ids == whole.ids[:1]
    assert stopped.finish_reason == generation_pb2.FINISH_REASON_STOP
    assert one.end is None
    assert stopped.end is None


async def test_d_repeats_the_committed_token_with_its_logprobs(cluster: Cluster) -> None:
    way = await route(cluster)
    sequence = spec(prompt(20), 3, logprobs=2)
    reserved = await way.decoder.reserve(sequence)
    answer = Answer()
    await way.push(sequence, reserved.reservation, answer)
    repeated = await way.decoder.queue((sequence.transfer_id, 0)).get()
    assert answer.first is not None
    assert not isinstance(repeated, Exception)
    assert (repeated.position, repeated.token_id) == (0, answer.first.token_id)
    assert repeated.logprobs == answer.first.logprobs
    assert len(repeated.logprobs.top) == 2
    await way.stream(sequence, answer)
    assert len(answer.ids) == 3


async def test_both_pools_count_what_they_did(cluster: Cluster) -> None:
    decode = await cluster.decode_worker()
    prefill = await cluster.prefill_worker()
    way = Route(cluster.prefill_stub(prefill), await cluster.subscribe(decode))
    answer = await way.generate(spec(prompt(33), 5))
    assert answer.end is not None
    p, d = prefill.describe().counters, decode.describe().counters
    assert (p.tokens_prefilled, p.tokens_decoded) == (33, 0)
    assert (d.tokens_prefilled, d.tokens_decoded) == (0, 4)
    assert p.kv_bytes_sent == d.kv_bytes_received == answer.end.transfer_bytes > 0
    assert p.rss_bytes > 0


async def run_here(decoder: Decoder, sequence: object) -> Answer:
    """Through a colocated worker."""
    answer = Answer()
    await decoder.reserve(sequence, HERE)  # type: ignore[arg-type]
    queue = decoder.queue((sequence.transfer_id, sequence.epoch))  # type: ignore[attr-defined]
    while answer.finish_reason == 0:
        output = await asyncio.wait_for(queue.get(), 30)
        assert not isinstance(output, Exception)
        answer.first = answer.first or output
        answer.take(output)
    return answer
