"""Where a decode worker takes its KV slowly, the prefill worker's memory fills to its bound and no further:
finished prompts that wait to be shipped keep their blocks, and the next ones wait for these."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from kv_transfer.codec import decode
from kv_transfer.frame import Blocks
from kv_transfer.receiver import Receiver
from kv_transfer.send_queue import SenderConfig
from kv_transfer.transport.base import InboundStream, Landing
from pdserve.v1.errors import ResourceExhausted
from prefill_worker.config import PrefillConfig
from prefill_worker.worker import PrefillWorker
from tests.integration.workers.mini_router import Cluster, Route, eventually, spec
from tests.unit.engine.driving import Reference, prompt

B = 16
# Less than a sender waits for an answer.
HELD_S = 8.0


@pytest.fixture(params=["memory", "grpc", "shm", "collective"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No KV is taken on D, nor what comes behind it, until it is set."""
    made = threading.Event()
    accept, land = Receiver.accept, Receiver.land

    def accept_held(self: Receiver, stream: InboundStream, raw: bytes) -> bytes | None:
        if isinstance(decode(raw)[0], Blocks):
            made.wait(HELD_S)
        return accept(self, stream, raw)

    def land_held(self: Receiver, stream: InboundStream, header: Blocks) -> Landing:
        made.wait(HELD_S)
        return land(self, stream, header)

    monkeypatch.setattr(Receiver, "accept", accept_held)
    monkeypatch.setattr(Receiver, "land", land_held)
    yield made
    made.set()


async def stalled(
    cluster: Cluster, config: PrefillConfig, transport: str = "memory"
) -> tuple[PrefillWorker, Route]:
    decode = await cluster.decode_worker(transport=transport, num_blocks=200)
    prefill = await cluster.prefill_worker(config, num_blocks=20)
    return prefill, Route(cluster.prefill_stub(prefill), await cluster.subscribe(decode))


async def test_prompts_wait_for_blocks_of_others_that_are_not_shipped(
    cluster: Cluster, gate: threading.Event, reference: Reference, transport: str
) -> None:
    prefill, way = await stalled(cluster, PrefillConfig(min_group_bytes=1), transport)
    prompts = [prompt(10 * B, seed) for seed in range(4)]  # two of them fill the pool of twenty blocks
    tasks = [asyncio.create_task(way.generate(spec(each, 4))) for each in prompts]
    await eventually(lambda: prefill.describe().counters.tokens_prefilled == 2 * 10 * B)
    await eventually(lambda: prefill.load().num_waiting == 2)
    load = prefill.load()
    assert (load.num_running, load.kv_blocks_free, load.num_transfers) == (0, 0, 4)
    assert load.queued_prompt_tokens == 2 * 10 * B  # which keeps a router from sending more
    gate.set()
    for each, answer in zip(prompts, await asyncio.gather(*tasks), strict=True):
        reference.assert_follows(each, answer.ids)
    await eventually(lambda: prefill.load().kv_blocks_used == 0)


async def test_an_engine_that_waits_for_blocks_sleeps(cluster: Cluster, gate: threading.Event) -> None:
    prefill, way = await stalled(cluster, PrefillConfig())
    steps: list[int] = []
    engine = prefill._loop.engine
    run_step = engine.step
    engine.step = lambda: steps.append(1) or run_step()  # type: ignore[func-returns-value,method-assign]
    tasks = [asyncio.create_task(way.generate(spec(prompt(10 * B, seed), 4))) for seed in range(3)]
    await eventually(lambda: prefill.describe().counters.tokens_prefilled == 2 * 10 * B)
    await eventually(lambda: prefill.load().num_waiting == 1)
    before = len(steps)
    await asyncio.sleep(0.3)
    assert len(steps) <= before + 1
    gate.set()
    await asyncio.gather(*tasks)


async def test_more_prompts_than_it_may_have_are_refused_at_once(
    cluster: Cluster, gate: threading.Event
) -> None:
    prefill, way = await stalled(cluster, PrefillConfig(max_num_prefills=3))
    tasks = [asyncio.create_task(way.generate(spec(prompt(10 * B, seed), 4))) for seed in range(3)]
    await eventually(lambda: prefill.load().num_transfers == 3)
    with pytest.raises(ResourceExhausted) as caught:
        await asyncio.wait_for(way.generate(spec(prompt(5), 4)), 2.0)
    assert caught.value.retry_after_s is not None
    gate.set()
    await asyncio.gather(*tasks)


async def test_a_prompt_that_is_cancelled_makes_room_for_one_that_waits(
    cluster: Cluster, gate: threading.Event
) -> None:
    """It was computed and not shipped: giving it up is the only way to its blocks."""
    prefill, way = await stalled(cluster, PrefillConfig())
    tasks = [asyncio.create_task(way.generate(spec(prompt(10 * B, seed), 4))) for seed in range(2)]
    await eventually(lambda: prefill.describe().counters.tokens_prefilled == 2 * 10 * B)
    tasks.append(asyncio.create_task(way.generate(spec(prompt(10 * B, 2), 4))))
    await eventually(lambda: prefill.load().num_waiting == 1)
    tasks[0].cancel()
    await eventually(lambda: prefill.load().num_waiting == 0)
    await eventually(lambda: prefill.describe().counters.tokens_prefilled == 3 * 10 * B)
    gate.set()
    await asyncio.gather(*tasks[1:])


async def test_what_is_on_its_way_stays_within_the_window(
    cluster: Cluster, gate: threading.Event, transport: str
) -> None:
    block_bytes = 2 * 2 * 2 * 16 * 16 * 4
    sender = SenderConfig(frame_bytes=block_bytes, window_bytes=3 * block_bytes)
    prefill, way = await stalled(cluster, PrefillConfig(sender=sender), transport)
    tasks = [asyncio.create_task(way.generate(spec(prompt(10 * B, seed), 4))) for seed in range(2)]
    await eventually(lambda: prefill.describe().counters.tokens_prefilled == 2 * 10 * B)
    await eventually(lambda: prefill.sender.bytes_sent > 0)
    await asyncio.sleep(0.1)
    assert prefill.sender.bytes_sent == 3 * block_bytes
    gate.set()
    answers = await asyncio.gather(*tasks)
    assert sum(answer.end.transfer_bytes for answer in answers if answer.end) == 20 * block_bytes
