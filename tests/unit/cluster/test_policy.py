"""What the controller decides, as tables."""

from __future__ import annotations

import pytest

from cluster.control.membership import Member, Pool, WorkerState
from cluster.control.policy import layout_difference, plan_pool, retry_delay_s
from pdserve.v1.cluster_pb2 import KVLayout
from worker.identity import Role

S = WorkerState


def pool(target: int, *states: S) -> Pool:
    members = [Member(f"decode-{n}", Role.DECODE, str(n), state=state) for n, state in enumerate(states)]
    return Pool(Role.DECODE, target, members)


@pytest.mark.parametrize(
    ("given", "start", "drain", "give_up", "forget"),
    [
        (pool(2), ["decode-0", "decode-1"], [], [], []),
        (pool(1, S.READY), [], [], [], []),
        (pool(1, S.UNHEALTHY), [], [], [], []),
        (pool(3, S.READY, S.STARTING), ["decode-2"], [], [], []),
        # A draining worker still has its name; its successor takes another.
        (pool(1, S.DRAINING), ["decode-1"], [], [], []),
        # A dead one leaves its name to its successor, and its reason until then.
        (pool(2, S.READY, S.DEAD), ["decode-1"], [], [], []),
        (pool(1, S.READY, S.DEAD), [], [], [], ["decode-1"]),
        (pool(0, S.READY, S.STARTING, S.DRAINING), [], ["decode-0"], ["decode-1"], []),
        # Who goes: the one still starting, then the unhealthy, then the last.
        (pool(2, S.READY, S.STARTING, S.READY), [], [], ["decode-1"], []),
        (pool(1, S.UNHEALTHY, S.READY), [], ["decode-0"], [], []),
        (pool(1, S.READY, S.READY), [], ["decode-1"], [], []),
    ],
)
def test_a_pool_is_brought_to_its_target(
    given: Pool, start: list[str], drain: list[str], give_up: list[str], forget: list[str]
) -> None:
    plan = plan_pool(given)
    assert list(plan.start) == start
    assert [member.worker_id for member in plan.drain] == drain
    assert [member.worker_id for member in plan.give_up] == give_up
    assert [member.worker_id for member in plan.forget] == forget


def test_failed_starts_are_repeated_ever_later_and_never_given_up() -> None:
    assert [retry_delay_s(n) for n in (0, 1, 2, 3, 5, 6, 50, 2000)] == [0, 1, 2, 4, 16, 30, 30, 30]


def test_layouts_that_differ_are_told_by_field() -> None:
    layout = KVLayout(num_layers=30, block_size=16, dtype="bfloat16", model_fingerprint="abc")
    other = KVLayout(num_layers=30, block_size=16, dtype="float32", model_fingerprint="abc")
    assert layout_difference(layout, [("decode-0", layout)]) is None
    assert layout_difference(layout, [("decode-0", layout), ("decode-1", other)]) == (
        "its KV differs from that of decode-1: dtype is bfloat16, not float32"
    )
