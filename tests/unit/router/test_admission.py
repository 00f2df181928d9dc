from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import cast

import pytest

from pdserve.v1.errors import DeadlineExceeded, PdserveError, ResourceExhausted, Unavailable
from router.admission import Admission
from router.attempt import Attempt
from router.config import QueueOrder
from router.fleet.placing import Placing
from router.queue_order import QueuePolicy
from tests.unit.router.test_request import make_request


class Places:
    """So many places, and a word of the controller."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self.verdict: PdserveError | None = None
        # By when a request was received.
        self.lateness: dict[float, PdserveError] = {}
        self.placed: list[float] = []

    def place(self, attempt: Attempt) -> bool:
        if self.num_places == 0:
            return False
        self.num_places -= 1
        self.placed.append(attempt.request.timeline.received_at)
        return True

    def hopeless(self) -> PdserveError | None:
        return self.verdict

    def too_late(self, attempt: Attempt) -> PdserveError | None:
        return self.lateness.get(attempt.request.timeline.received_at)

    def uncached_tokens(self, attempt: Attempt) -> int:
        return attempt.num_tokens


def admission(
    places: Places,
    max_queued: int = 3,
    order: QueueOrder = QueueOrder.FCFS,
    clock: Callable[[], float] = time.monotonic,
) -> Admission:
    return Admission(max_queued, QueuePolicy(order, aging_s=30.0), cast("Placing", places), clock)


def attempt(received_at: float = 0.0, num_tokens: int = 2) -> Attempt:
    request = make_request(num_prompt_tokens=num_tokens)
    request.timeline.received_at = received_at
    return Attempt(request)


async def waiting(queue: Admission, made: Attempt) -> asyncio.Task[None]:
    task = asyncio.ensure_future(queue.enter(made))
    await asyncio.sleep(0)
    return task


async def test_who_came_first_goes_first_also_on_coming_back() -> None:
    places = Places(0)
    queue = admission(places)
    tasks = [await waiting(queue, attempt(at)) for at in (2.0, 3.0, 1.0)]
    places.num_places = 2
    queue.grant()
    assert places.placed == [1.0, 2.0]
    assert queue.num_waiting == 1
    places.num_places = 1
    queue.grant()
    await asyncio.gather(*tasks)
    assert places.placed == [1.0, 2.0, 3.0]


async def test_a_full_queue_refuses_new_ones_only() -> None:
    places = Places(0)
    queue = admission(places, max_queued=1)
    queue.refuse_if_full()
    first = await waiting(queue, attempt(1.0))
    with pytest.raises(ResourceExhausted) as refused:
        queue.refuse_if_full()
    assert refused.value.retry_after_s
    second = await waiting(queue, attempt(2.0))
    assert queue.num_waiting == 2
    places.num_places = 2
    queue.grant()
    await asyncio.gather(first, second)


async def test_a_cancelled_ticket_leaves_the_queue() -> None:
    queue = admission(Places(0))
    task = await waiting(queue, attempt())
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert queue.num_waiting == 0


async def test_nobody_leaves_while_decode_memory_is_full() -> None:
    places = Places(5)
    queue = admission(places)
    queue.no_room(retry_s=60)
    task = await waiting(queue, attempt())
    queue.grant()
    assert queue.num_waiting == 1
    queue.room()
    await task
    queue.no_room(retry_s=0.01)
    await asyncio.wait_for(queue.enter(attempt()), 5)


async def test_who_found_no_room_asks_again_alone() -> None:
    places = Places(5)
    queue = admission(places)
    queue.no_room(retry_s=60)
    refused = attempt(1.0)
    refused.request.num_refusals = 1
    tasks = [await waiting(queue, each) for each in (refused, attempt(2.0))]
    queue.room()
    assert places.placed == [1.0]
    queue.grant()
    assert places.placed == [1.0]
    queue.answered(refused)
    queue.answered(refused)
    await asyncio.gather(*tasks)
    assert places.placed == [1.0, 2.0]


async def test_waiting_in_vain_is_told_to_all() -> None:
    places = Places(0)
    queue = admission(places)
    tasks = [await waiting(queue, attempt(at)) for at in (1.0, 2.0)]
    places.verdict = Unavailable("gone for good")
    queue.grant()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, Unavailable) for result in results)
    assert queue.num_waiting == 0


async def test_who_can_no_longer_be_in_time_takes_nobodys_place() -> None:
    places = Places(0)
    queue = admission(places)
    tasks = [await waiting(queue, attempt(at)) for at in (1.0, 2.0)]
    places.lateness[1.0] = DeadlineExceeded("too late")
    places.num_places = 1
    queue.grant()
    first, second = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(first, DeadlineExceeded)
    assert second is None
    assert places.placed == [2.0]
    places.lateness[3.0] = DeadlineExceeded("too late")
    with pytest.raises(DeadlineExceeded):
        await queue.enter(attempt(3.0))


async def test_the_time_to_come_back_follows_the_queues_own_pace() -> None:
    places = Places(100)
    queue = admission(places)
    for _ in range(50):
        await queue.enter(attempt())  # nobody waits: that says nothing
    await asyncio.sleep(0.2)
    places.num_places = 0
    tasks = [await waiting(queue, attempt(at)) for at in range(80)]
    slow = queue.retry_after_s
    assert slow == 30.0  # nothing is known of its pace but a guess
    for _ in range(60):
        places.num_places = 1
        queue.grant()
        await asyncio.sleep(0.001)
    assert 0.1 <= queue.retry_after_s < slow
    places.num_places = len(tasks)
    queue.grant()
    await asyncio.gather(*tasks)


async def test_a_queue_that_does_not_move_tells_longer_times() -> None:
    queue = admission(Places(0))
    queue._grant_interval_s = 0.01
    task = await waiting(queue, attempt())
    before = queue.retry_after_s
    await asyncio.sleep(0.3)
    assert queue.retry_after_s > 2 * before
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_the_shortest_prompt_goes_first_where_that_is_the_order() -> None:
    places, now = Places(0), 100.0
    queue = admission(places, order=QueueOrder.SHORTEST, clock=lambda: now)
    tasks = [await waiting(queue, attempt(at, num)) for at, num in ((98.0, 900), (99.0, 20), (99.5, 20))]
    places.num_places = 3
    queue.grant()
    await asyncio.gather(*tasks)
    assert places.placed == [99.0, 99.5, 98.0]


async def test_a_long_prompt_goes_in_time_however_many_short_ones_keep_coming() -> None:
    """One place each second, and before it one more short prompt than there are places."""
    places, now = Places(0), 0.0
    queue = admission(places, order=QueueOrder.SHORTEST, clock=lambda: now)
    long = await waiting(queue, attempt(0.0, 4000))
    tasks = []
    while not long.done() and now < 60:
        tasks.append(await waiting(queue, attempt(now + 0.5, 20)))
        now += 1.0
        places.num_places = 1
        queue.grant()
        await asyncio.sleep(0)
    # It counts for less than a new short one shortly before its 30 s are over.
    assert now == 30.0
    places.num_places = len(tasks)
    queue.grant()
    await asyncio.gather(long, *tasks)
    assert queue.num_waiting == 0
