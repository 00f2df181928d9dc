from __future__ import annotations

from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from router.attempt import Attempt
from router.config import QueueOrder
from router.fleet.placing import Placing
from router.fleet.workers import WorkerTable
from router.queue_order import QueuePolicy
from router.request import Request
from tests.unit.router.test_request import make_request

SHORTEST = QueuePolicy(QueueOrder.SHORTEST, aging_s=30.0)
LENGTHS = st.integers(1, 1_000_000)
WAITS = st.floats(0, 1000)


@given(LENGTHS, WAITS, LENGTHS, WAITS)
def test_first_come_first_served_looks_at_the_arrival_only(a: int, a_s: float, b: int, b_s: float) -> None:
    policy = QueuePolicy(QueueOrder.FCFS, aging_s=30.0)
    assert (policy.rank(a, a_s) < policy.rank(b, b_s)) == (a_s > b_s)


def test_of_two_that_came_together_the_shorter_goes_first() -> None:
    assert SHORTEST.rank(100, 5.0) < SHORTEST.rank(101, 5.0)


def test_of_equal_ones_the_older_goes_first() -> None:
    assert SHORTEST.rank(100, 5.0) < SHORTEST.rank(100, 4.9)


def test_waiting_makes_up_for_length() -> None:
    assert SHORTEST.rank(1000, 10.0) > SHORTEST.rank(600, 0.0)
    assert SHORTEST.rank(1000, 15.0) < SHORTEST.rank(600, 0.0)


@given(LENGTHS, LENGTHS, st.floats(30.0, 1000), st.floats(0.001, 1000))
def test_who_has_waited_long_enough_is_overtaken_by_nobody_younger(
    long: int, short: int, waited_s: float, younger_by_s: float
) -> None:
    younger_s = max(0.0, waited_s - younger_by_s)
    assert SHORTEST.rank(long, waited_s) < SHORTEST.rank(short, younger_s)


class Table:
    def __init__(self, *usable: str) -> None:
        self.usable_ids = usable

    def can_use(self, instance_id: str) -> bool:
        return instance_id in self.usable_ids


def uncached(request: Request, *usable: str) -> int:
    return Placing(cast("WorkerTable", Table(*usable)), 1).uncached_tokens(Attempt(request))


def test_a_prompt_that_a_usable_worker_had_before_counts_for_one_token() -> None:
    request = make_request(num_prompt_tokens=50)
    assert uncached(request, "a") == 50
    request.affinity.prefill_instance = "a"
    assert uncached(request, "a") == 1
    assert uncached(request, "b") == 50
    request.avoid.add("a")
    assert uncached(request, "a") == 50
