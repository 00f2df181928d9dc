"""The order in which a router lets requests go to its one prefill worker."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.integration.router.harness import Cluster, running, until


async def order_of_prefills(cluster: Cluster, lengths: tuple[int, ...]) -> list[int]:
    """Prompts of these lengths come in this order while the worker is busy with another."""
    cluster.p.hold_token.clear()
    first = asyncio.create_task(cluster.client.generate([1] * 50, max_tokens=2))
    await until(lambda: len(cluster.p.prompts) == 1)
    tasks = []
    for length in lengths:
        tasks.append(asyncio.create_task(cluster.client.generate([2] * length, max_tokens=2)))
        await until(lambda: cluster.router._dispatcher.admission.num_waiting == len(tasks))
    cluster.p.hold_token.set()
    await asyncio.gather(first, *tasks)
    return [len(prompt) for prompt in cluster.p.prompts[1:]]


@pytest.mark.parametrize(("order", "expected"), [("fcfs", [30, 4, 20, 1]), ("shortest", [1, 4, 20, 30])])
async def test_the_queue_has_the_order_that_is_set(model_dir: Path, order: str, expected: list[int]) -> None:
    async with running(model_dir, queue_order=order, prefill_backlog_tokens=1) as cluster:
        assert await order_of_prefills(cluster, (30, 4, 20, 1)) == expected


async def test_small_prompts_do_not_take_the_room_that_a_large_one_waits_for(cluster: Cluster) -> None:
    """Eight clients ask for a block each, again and again; a prompt that needs all ten has its turn."""
    cluster.d.num_blocks, cluster.d.step_s = 10, 0.005
    num_small, num_enough = 0, 100
    large_is_done = asyncio.Event()

    async def ask_again_and_again(number: int) -> None:
        nonlocal num_small
        while num_small < num_enough and not large_is_done.is_set():
            await cluster.client.generate([number] * 4, max_tokens=10 + 3 * number)
            num_small += 1

    async def ask_for_all() -> None:
        await until(lambda: len(cluster.d.reserved) == 8)
        await cluster.client.generate([9] * 40, max_tokens=2)
        large_is_done.set()

    await asyncio.gather(ask_for_all(), *(ask_again_and_again(number) for number in range(8)))
    assert num_small < num_enough


async def test_nobody_waits_for_a_large_prompt_whose_room_is_another_routers(cluster: Cluster) -> None:
    cluster.d.num_blocks = 5  # the others are taken by requests that this router does not know
    large = asyncio.ensure_future(cluster.client.generate([9] * 40, max_tokens=2, timeout=60))
    await until(lambda: cluster.d.num_reserves >= 2)
    for number in range(5):
        await cluster.client.generate([number] * 4, max_tokens=3, timeout=20)
    assert not large.done()
    large.cancel()
    await asyncio.gather(large, return_exceptions=True)
