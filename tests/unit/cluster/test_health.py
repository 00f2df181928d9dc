"""What follows from a worker's silence, as a table."""

from __future__ import annotations

import math

import pytest

from cluster.control.health import Patience, Verdict, judge, stuck_senders
from cluster.control.membership import Member, WorkerState
from pdserve.v1.cluster_pb2 import Quarantine, WorkerStatus
from router.fleet.vigil import Vigil, Vitals
from worker.identity import Role

S, V = WorkerState, Verdict
PATIENCE = Patience(unhealthy_after_s=3, dead_after_silent_s=8, dead_after_steps=10, dead_after_s=30)


def watched(silent_s: float, stalled_s: float, step_s: float) -> Vigil:
    """One that stands still in a step and has said nothing of late."""
    vitals = Vitals(7, is_working=True, is_compiling=False, heartbeat_age_s=0.0, step_s=step_s)
    vigil = Vigil(longest_look_s=math.inf)
    vigil.heard(vitals)
    vigil.passed(stalled_s - silent_s)
    vigil.heard(vitals)
    vigil.passed(silent_s)
    return vigil


@pytest.mark.parametrize(
    ("state", "silent_s", "stalled_s", "step_s", "is_broken", "verdict"),
    [
        (S.READY, 1, 1, 0.1, False, V.AS_BEFORE),
        (S.READY, 4, 4, 0.1, False, V.UNHEALTHY),
        (S.READY, 1, 4, 0.1, False, V.UNHEALTHY),
        (S.UNHEALTHY, 4, 4, 0.1, False, V.AS_BEFORE),
        (S.UNHEALTHY, 1, 1, 0.1, False, V.READY),
        (S.UNHEALTHY, 7, 7, 0.1, False, V.AS_BEFORE),
        (S.UNHEALTHY, 9, 9, 0.1, False, V.DEAD),
        (S.UNHEALTHY, 9, 9, 4.0, False, V.DEAD),  # its steps take long, but its heartbeat has none
        (S.UNHEALTHY, 1, 29, 0.1, False, V.AS_BEFORE),  # it runs
        (S.UNHEALTHY, 1, 31, 0.1, False, V.DEAD),
        (S.UNHEALTHY, 1, 31, 4.0, False, V.AS_BEFORE),  # its steps take long
        (S.UNHEALTHY, 1, 41, 4.0, False, V.DEAD),
        (S.READY, 0, 0, 0.1, True, V.DEAD),
        (S.DRAINING, 4, 4, 0.1, False, V.AS_BEFORE),
        (S.DRAINING, 0, 0, 0.1, True, V.AS_BEFORE),
        (S.DRAINING, 9, 9, 0.1, False, V.DEAD),
        (S.DRAINING, 1, 31, 0.1, False, V.DEAD),
    ],
)
def test_a_missing_sign_of_life_is_borne_for_a_while(
    state: S, silent_s: float, stalled_s: float, step_s: float, is_broken: bool, verdict: V
) -> None:
    vigil = watched(silent_s, stalled_s, step_s)
    assert judge(state, vigil, PATIENCE, is_broken=is_broken) is verdict


def test_nobody_is_replaced_who_may_still_be_chosen() -> None:
    patience = Patience(unhealthy_after_s=40, dead_after_silent_s=8, dead_after_steps=10, dead_after_s=30)
    for silent_s in (9, 39):
        assert judge(S.READY, watched(silent_s, 39, 0.1), patience) is V.AS_BEFORE
    assert judge(S.READY, watched(41, 41, 0.1), patience) is V.DEAD


def test_on_another_machine_silence_may_be_the_networks_and_is_borne_for_longer() -> None:
    for silent_s, verdict in ((9, V.AS_BEFORE), (29, V.AS_BEFORE), (31, V.DEAD)):
        vigil = watched(silent_s, silent_s, 0.1)
        assert judge(S.UNHEALTHY, vigil, PATIENCE, is_here=False) is verdict


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
