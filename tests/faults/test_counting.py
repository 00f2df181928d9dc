"""What is counted comes back to where it began, whichever way requests left; and it shows who did what."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from engine.loading import LoadedModel
from pdserve.client import Client, Generation, PdserveError
from pdserve.v1 import cluster_pb2
from router.fleet.worker_info import Role as RouterRole
from tests.integration.router.harness import until
from tests.serving import Serving, serving
from tests.unit.engine.driving import prompt
from worker.identity import Role

B = 16
GAUGES = (
    "num_running",
    "num_waiting",
    "queued_prompt_tokens",
    "kv_blocks_used",
    "num_reservations",
    "num_transfers",
    "kv_blocks_quarantined",
)


def loads(serves: Serving) -> list[cluster_pb2.WorkerLoad]:
    return [worker.describe().load for worker in serves.workers]


def assert_all_zero(serves: Serving) -> None:
    for load in loads(serves):
        assert {gauge: getattr(load, gauge) for gauge in GAUGES} == dict.fromkeys(GAUGES, 0)
    dispatcher = serves.router._dispatcher
    assert (
        dispatcher.num_in_flight == dispatcher.admission.num_waiting == dispatcher._releaser.num_pending == 0
    )
    assert serves.router._codec._num_long_texts == 0
    for worker in serves.router.table.all():
        assert not any(worker.holdings.by_name().values())
        assert worker.holdings.outstanding_tokens == 0


async def every_way_out(client: Client, number: int, dice: random.Random) -> Generation:
    """Good, refused, cancelled, timed out, over the limit: by turns."""
    ids = prompt(dice.randrange(1, 100), seed=number)
    kind = number % 6
    if kind == 0:
        return await client.generate("word " * 3000, max_tokens=5)  # too long, by tokens
    if kind == 1:
        return await client.generate(ids, max_tokens=0)
    if kind == 2:
        return await client.generate(ids, max_tokens=100, timeout=dice.random() * 0.2, ignore_eos=True)
    if kind == 3:
        work = asyncio.ensure_future(client.generate(ids, max_tokens=200, ignore_eos=True, n=2))
        asyncio.get_running_loop().call_later(dice.random() * 0.2, work.cancel)
        return await work
    if kind == 4:
        return await client.generate(ids, model="other")
    return await client.generate(ids, max_tokens=10)


async def test_all_gauges_are_zero_after_every_way_out(folder: Path, loaded: LoadedModel) -> None:
    dice = random.Random(33)
    roles = [Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE]
    async with serving(folder, loaded, roles, num_blocks=24, router={"max_queued_requests": 30}) as serves:
        outcomes: list[object] = await asyncio.gather(
            *(every_way_out(serves.client, number, dice) for number in range(120)), return_exceptions=True
        )
        good = [each for each in outcomes if isinstance(each, Generation)]
        bad = {type(each).__name__ for each in outcomes if isinstance(each, BaseException)}
        assert len(good) >= 5
        assert bad <= {
            "InvalidArgument",
            "NotFound",
            "DeadlineExceeded",
            "CancelledError",
            "ResourceExhausted",
        }
        assert len(bad) >= 4
        await until(serves.is_idle)
        assert_all_zero(serves)
        # What the router goes by when it places a request follows.
        table = serves.router.table
        await until(lambda: all(w.decode_view().free_blocks == 24 for w in table.usable(RouterRole.DECODE)))
        await until(
            lambda: all(w.prefill_view().queued_tokens == 0 for w in table.usable(RouterRole.PREFILL))
        )


async def test_cached_tokens_never_count_the_transfer(folder: Path, loaded: LoadedModel) -> None:
    """Cold: none, though D has received all of them. Warm: whole blocks of P's, and never the last token."""
    async with serving(folder, loaded) as serves:
        for length in (1, B - 1, B, B + 1, 2 * B, 5 * B + 3):
            ids = prompt(length, seed=length)
            for expected in (0, (length - 1) // B * B):
                answer = await serves.client.generate(ids, max_tokens=B + 2, ignore_eos=True)
                assert answer.usage.cached_tokens == expected
                assert answer.usage.prompt_tokens == length
        # A longer prompt hits what it shares, by whole blocks; one that differs in its first token nothing.
        longer = (*prompt(2 * B, seed=2 * B), *prompt(20, seed=3))
        assert (await serves.client.generate(longer, max_tokens=2)).usage.cached_tokens == 2 * B
        other = ((longer[0] + 1) % 500, *longer[1:])
        assert (await serves.client.generate(other, max_tokens=2)).usage.cached_tokens == 0


async def test_each_pool_counts_its_own_share_and_the_bytes_between_them(
    folder: Path, loaded: LoadedModel
) -> None:
    async with serving(folder, loaded) as serves:
        (p,), (d,) = serves.of(Role.PREFILL), serves.of(Role.DECODE)
        shipped = 0
        for number, length in enumerate((1, B, 40), start=1):
            answer = await serves.client.generate(prompt(length, seed=number), max_tokens=7, ignore_eos=True)
            blocks = -(-length // B)
            assert answer.timings.transfer_bytes == blocks * p._loop.engine.layout.block_bytes
            shipped += answer.timings.transfer_bytes
            assert (answer.prefill_worker, answer.decode_worker) == ("prefill-0", "decode-1")
        sent, received = p.describe().counters, d.describe().counters
        assert (sent.tokens_prefilled, sent.tokens_decoded) == (1 + B + 40, 0)
        assert (received.tokens_prefilled, received.tokens_decoded) == (0, 3 * 6)
        assert sent.kv_bytes_sent == received.kv_bytes_received == shipped
        await until(lambda: not any(load.kv_blocks_used for load in loads(serves)))
    async with serving(folder, loaded, [Role.COLOCATED]) as serves:
        answer = await serves.client.generate(prompt(40), max_tokens=7, ignore_eos=True)
        assert answer.timings.transfer_bytes == 0
        (worker,) = serves.workers
        counters = worker.describe().counters
        assert (counters.tokens_prefilled, counters.tokens_decoded, counters.kv_bytes_received) == (40, 6, 0)


async def test_how_long_a_hand_over_took_is_told_to_the_client_and_summed_by_transport(
    folder: Path, loaded: LoadedModel
) -> None:
    async with serving(folder, loaded, num_blocks=200) as serves:
        (p,), (d,) = serves.of(Role.PREFILL), serves.of(Role.DECODE)
        told = []
        for number in range(3):
            answer = await serves.client.generate(prompt(1500, number), max_tokens=3, ignore_eos=True)
            told.append(answer.timings)
            assert 0 < answer.timings.handover_ms <= answer.timings.decode_start_ms < 1000
            # It ran in 32 chunks: the first of them were there long before, the last layers were not.
            assert 0 < answer.timings.hidden_bytes < answer.timings.transfer_bytes
        ended = await serves.client.generate(prompt(20), max_tokens=1)
        assert (ended.timings.handover_ms, ended.timings.decode_start_ms) == (0, 0)
        (sent,), (received,) = p.describe().counters.transfers, d.describe().counters.transfers
        assert (sent.transport, sent.num_transfers) == (received.transport, received.num_transfers)
        assert (sent.transport, sent.num_transfers, received.num_started) == ("grpc", 3, 3)
        assert sent.num_bytes == received.num_bytes == sum(each.transfer_bytes for each in told)
        assert sent.hidden_bytes == sum(each.hidden_bytes for each in told)
        assert received.handover_ms == pytest.approx(sum(each.handover_ms for each in told))
        assert received.decode_start_ms == pytest.approx(sum(each.decode_start_ms for each in told))
        assert min(sent.transfer_ms, received.transfer_ms) > 0
        (route,) = p.describe().kv_routes
        assert (route.instance_id, route.transport) == (d.identity.instance_id, "grpc")


async def test_a_request_that_fails_half_way_is_counted_once(folder: Path, loaded: LoadedModel) -> None:
    async with serving(folder, loaded, num_blocks=8) as serves:
        for number in range(5):
            try:
                await serves.client.generate(
                    prompt(60, seed=number), max_tokens=60, timeout=0.02 * number, ignore_eos=True
                )
            except PdserveError:
                pass
        await until(serves.is_idle)
        assert_all_zero(serves)


async def test_a_report_of_a_queue_is_not_believed_for_ever(folder: Path, loaded: LoadedModel) -> None:
    """A prefill worker reports with its answers only: its last word would keep new prompts away from it."""
    roles = [Role.PREFILL, Role.PREFILL, Role.DECODE]
    async with serving(folder, loaded, roles) as serves:
        said, silent = serves.router.table.usable(RouterRole.PREFILL)
        said.note_load(cluster_pb2.WorkerLoad(queued_prompt_tokens=1000))
        assert said.prefill_view().queued_tokens == 1000
        answer = await serves.client.generate(prompt(9), max_tokens=2)
        assert answer.prefill_worker == silent.info.id
        await until(lambda: said.prefill_view().queued_tokens == 0)
        answers = [await serves.client.generate(prompt(9, seed=n), max_tokens=2) for n in range(4)]
        assert {answer.prefill_worker for answer in answers} == {said.info.id, silent.info.id}
