from __future__ import annotations

import asyncio

import pytest

from decode_worker.subscription import StepBatch, StepToken, Subscription
from engine.request import NewToken
from kv_transfer.frame import TransferKey
from pdserve.v1.errors import ResourceExhausted, Unavailable

KEY = TransferKey("a", 0)


def batch(position: int) -> StepBatch:
    return StepBatch(tokens=[StepToken(KEY, NewToken(position, 1, None))])


class Reader:
    """A router that takes `num_batches` and then stops reading."""

    def __init__(self, num_batches: int) -> None:
        self.taken: list[StepBatch] = []
        self._num_batches = num_batches
        self.is_full = asyncio.Event()

    async def __call__(self, taken: StepBatch) -> None:
        if len(self.taken) == self._num_batches:
            self.is_full.set()
            await asyncio.Event().wait()
        self.taken.append(taken)


async def test_batches_arrive_in_order_and_the_end_comes_behind_them() -> None:
    subscription, reader = Subscription("r", 10), Reader(10)
    for position in range(5):
        assert subscription.put(batch(position))
    subscription.finish(Unavailable("stops"))
    with pytest.raises(Unavailable):
        await subscription.deliver(reader)
    assert [b.tokens[0].token.position for b in reader.taken] == [0, 1, 2, 3, 4]
    assert subscription.put(batch(5))  # too late, and no error


async def test_a_router_that_falls_behind_is_cut_off_in_the_middle_of_a_write() -> None:
    subscription, reader = Subscription("r", 3), Reader(1)
    subscription.put(batch(0))
    delivering = asyncio.create_task(subscription.deliver(reader))
    subscription.put(batch(1))
    await reader.is_full.wait()
    assert [subscription.put(batch(position)) for position in range(2, 6)] == [True, True, True, False]
    with pytest.raises(ResourceExhausted):
        await delivering


async def test_a_mere_load_is_told_only_if_nothing_else_is() -> None:
    subscription, reader = Subscription("r", 2), Reader(10)
    for news in (StepBatch(), StepBatch(), batch(0), StepBatch(), StepBatch()):
        assert subscription.put(news)
    subscription.finish(Unavailable("stops"))
    with pytest.raises(Unavailable):
        await subscription.deliver(reader)
    assert [b.is_empty for b in reader.taken] == [True, False]


async def test_a_call_that_is_cancelled_stays_cancelled() -> None:
    subscription = Subscription("r", 2)
    delivering = asyncio.create_task(subscription.deliver(Reader(1)))
    await asyncio.sleep(0)
    delivering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await delivering
