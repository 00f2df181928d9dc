"""What follows from a worker's silence, as a table."""

from __future__ import annotations

import pytest

from cluster.control.health import Patience, Verdict, judge
from cluster.control.membership import WorkerState

S, V = WorkerState, Verdict
PATIENCE = Patience(unhealthy_after_s=3, dead_after_s=30)


@pytest.mark.parametrize(
    ("state", "silent_s", "is_broken", "verdict"),
    [
        (S.READY, 1, False, V.AS_BEFORE),
        (S.READY, 4, False, V.UNHEALTHY),
        (S.UNHEALTHY, 4, False, V.AS_BEFORE),
        (S.UNHEALTHY, 1, False, V.READY),
        (S.UNHEALTHY, 31, False, V.DEAD),
        (S.READY, 0, True, V.DEAD),
        (S.DRAINING, 4, False, V.AS_BEFORE),
        (S.DRAINING, 0, True, V.AS_BEFORE),
        (S.DRAINING, 31, False, V.DEAD),
    ],
)
def test_silence_is_borne_for_a_while(state: S, silent_s: float, is_broken: bool, verdict: V) -> None:
    assert judge(state, silent_s, is_broken, PATIENCE) is verdict
