"""Two prompts that begin alike go to one decode worker at the same time: their common blocks are shipped once
or twice, and neither disturbs the other."""

from __future__ import annotations

import asyncio

import pytest

from decode_worker.config import DecodeConfig
from kv_transfer.send_queue import SenderConfig
from kv_transfer.verify import Verify
from prefill_worker.config import PrefillConfig
from tests.integration.workers.mini_router import Answer, Cluster, Route, eventually, spec
from tests.unit.engine.driving import Reference, prompt

B = 16
COMMON = prompt(8 * B, seed=5)
BLOCK_BYTES = 2 * 2 * 2 * B * 16 * 4


@pytest.fixture(params=["memory", "grpc", "shm", "collective"])
async def ways(request: pytest.FixtureRequest, cluster: Cluster) -> list[Route]:
    """Two prefill workers and one decode worker; every byte is checked."""
    decode = await cluster.decode_worker(DecodeConfig(verify=Verify.FULL), transport=request.param)
    decoder = await cluster.subscribe(decode)
    sender = SenderConfig(frame_bytes=BLOCK_BYTES, verify=Verify.FULL)
    config = PrefillConfig(min_group_bytes=1, sender=sender)
    prefills = [await cluster.prefill_worker(config) for _ in range(2)]
    return [Route(cluster.prefill_stub(prefill), decoder) for prefill in prefills]


def shipped(answer: Answer) -> int:
    assert answer.end is not None
    return answer.end.num_blocks


@pytest.mark.parametrize("senders", [(0, 0), (0, 1)])
@pytest.mark.parametrize("is_same", [False, True])
async def test_prompts_that_were_both_reserved_cold_ship_their_prefix_twice(
    ways: list[Route], reference: Reference, senders: tuple[int, int], is_same: bool
) -> None:
    tails = [prompt(B + 3, seed=0 if is_same else n) for n in (0, 1)]
    sequences = [spec([*COMMON, *tail], 12) for tail in tails]
    decoder = ways[0].decoder
    reserved = [await decoder.reserve(sequence) for sequence in sequences]
    answers = [Answer(), Answer()]

    async def one(number: int) -> None:
        way = ways[senders[number]]
        await way.push(sequences[number], reserved[number].reservation, answers[number])
        await way.stream(sequences[number], answers[number])

    await asyncio.gather(one(0), one(1))
    for tail, answer in zip(tails, answers, strict=True):
        reference.assert_follows([*COMMON, *tail], answer.ids)
        assert shipped(answer) == 10
    await decoder.release(*sequences)
    # Of the two copies one is the cache's.
    tail = prompt(3, seed=9)
    third = await ways[0].generate(spec([*COMMON, *tail], 6))
    reference.assert_follows([*COMMON, *tail], third.ids)
    assert shipped(third) == 1


async def test_a_prompt_that_is_reserved_behind_the_first_ships_only_its_own_end(
    ways: list[Route], reference: Reference
) -> None:
    tails = [prompt(B + 3, seed=number) for number in (0, 1)]
    first = asyncio.create_task(ways[0].generate(spec([*COMMON, *tails[0]], 200)))
    await eventually(lambda: ways[0].decoder.load is not None and ways[0].decoder.load.num_running == 1)
    sequence, second = spec([*COMMON, *tails[1]], 12), Answer()
    reserved = await ways[1].decoder.reserve(sequence)
    assert not first.done()
    await ways[1].push(sequence, reserved.reservation, second)
    await ways[1].stream(sequence, second)
    await ways[1].decoder.release(sequence)
    reference.assert_follows([*COMMON, *tails[0]], (await first).ids)
    reference.assert_follows([*COMMON, *tails[1]], second.ids)
    assert shipped(second) == 2


async def test_a_twin_that_is_cancelled_half_way_takes_nothing_from_the_other(
    ways: list[Route], reference: Reference
) -> None:
    """In whichever order they come in: ten times, a moment later each time."""
    decoder = ways[0].decoder
    for number in range(10):
        prefix = prompt(10 * B, seed=100 + number)
        gone, kept = spec([*prefix, 1], 12), spec([*prefix, 2], 12)
        reserved = [await decoder.reserve(sequence) for sequence in (gone, kept)]
        leaving = asyncio.create_task(ways[1].push(gone, reserved[0].reservation, Answer()))
        answer = Answer()
        pushing = asyncio.create_task(ways[0].push(kept, reserved[1].reservation, answer))
        await asyncio.sleep(0.003 * number)
        leaving.cancel()
        await asyncio.gather(leaving, decoder.release(gone), return_exceptions=True)
        await pushing
        await ways[0].stream(kept, answer)
        await decoder.release(kept)
        reference.assert_follows([*prefix, 2], answer.ids)
        again = await ways[1].generate(spec([*prefix, 3], 4))
        reference.assert_follows([*prefix, 3], again.ids)
        assert shipped(again) == 1
