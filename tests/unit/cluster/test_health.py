"""What follows from a worker's silence, as a table."""

from __future__ import annotations

import pytest

from cluster.control.health import Patience, Verdict, judge, stuck_senders
from cluster.control.membership import Member, WorkerState
from pdserve.v1.cluster_pb2 import Quarantine, WorkerStatus
from worker.identity import Role

S, V = WorkerState, Verdict
PATIENCE = Patience(unhealthy_after_s=3, dead_after_steps=10, dead_after_s=30)


@pytest.mark.parametrize(
    ("state", "still_s", "step_s", "is_broken", "verdict"),
    [
        (S.READY, 1, 0.1, False, V.AS_BEFORE),
        (S.READY, 4, 0.1, False, V.UNHEALTHY),
        (S.UNHEALTHY, 4, 0.1, False, V.AS_BEFORE),
        (S.UNHEALTHY, 1, 0.1, False, V.READY),
        (S.UNHEALTHY, 31, 0.1, False, V.DEAD),
        (S.UNHEALTHY, 31, 4.0, False, V.AS_BEFORE),  # its steps take long
        (S.UNHEALTHY, 41, 4.0, False, V.DEAD),
        (S.READY, 0, 0.1, True, V.DEAD),
        (S.DRAINING, 4, 0.1, False, V.AS_BEFORE),
        (S.DRAINING, 0, 0.1, True, V.AS_BEFORE),
        (S.DRAINING, 31, 0.1, False, V.DEAD),
    ],
)
def test_a_missing_sign_of_life_is_borne_for_a_while(
    state: S, still_s: float, step_s: float, is_broken: bool, verdict: V
) -> None:
    assert judge(state, still_s, step_s, is_broken, PATIENCE) is verdict


def member(name: str, role: Role, pid: int, node: str = "a", state: S = S.READY) -> Member:
    return Member(name, role, key=name, state=state, node=node, pid=pid)


@pytest.mark.parametrize(
    ("age_s", "sender", "is_stuck"),
    [
        (31, member("prefill-0", Role.PREFILL, 5), True),
        (29, member("prefill-0", Role.PREFILL, 5), False),
        (31, member("prefill-0", Role.PREFILL, 6), False),
        (31, member("prefill-0", Role.PREFILL, 5, node="b"), False),  # the same pid, elsewhere
        (31, member("prefill-0", Role.PREFILL, 5, state=S.UNHEALTHY), True),
        (31, member("prefill-0", Role.PREFILL, 5, state=S.DEAD), False),
        (31, member("prefill-0", Role.PREFILL, 5, state=S.STARTING), False),
    ],
)
def test_who_may_write_anothers_blocks_for_too_long_is_stuck(
    age_s: int, sender: Member, is_stuck: bool
) -> None:
    waiting = member("decode-0", Role.DECODE, 4)
    quarantine = Quarantine(sender_pid=5, num_blocks=2, age_ms=age_s * 1000)
    waiting.report = WorkerStatus(quarantines=[quarantine])
    found = stuck_senders([sender, waiting], Patience(quarantine_s=30))
    told = {"prefill-0": "2 blocks of decode-0 wait for it to write no more"}
    assert found == (told if is_stuck else {})
