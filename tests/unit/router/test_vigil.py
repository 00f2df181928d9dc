"""What a watcher makes of somebody's words and silence."""

from __future__ import annotations

import pytest

from router.fleet.vigil import LONGEST_LOOK_S, Vigil, Vitals


def vitals(
    progress: int = 1, *, works: bool = True, compiles: bool = False, heartbeat_age_s: float = 0.0
) -> Vitals:
    return Vitals(progress, works, compiles, heartbeat_age_s, step_s=0.5)


def waited(vigil: Vigil, seconds: float) -> Vigil:
    for _ in range(round(seconds / 0.5)):
        vigil.passed(0.5)
    return vigil


def test_before_the_first_word_nothing_is_missed() -> None:
    assert waited(Vigil(), 100).still_s == 0


def test_silence_counts_from_the_last_word() -> None:
    vigil = Vigil()
    vigil.heard(vitals(works=False))
    assert waited(vigil, 4).still_s == 4
    assert vigil.complaint() == "has given no sign of life for 4 s"
    vigil.heard(vitals(works=False))
    assert vigil.still_s == 0


@pytest.mark.parametrize(
    ("then", "still_s"),
    [
        (vitals(1), 8),  # it speaks, and computes nothing
        (vitals(2), 4),
        (vitals(1, works=False), 0),  # nothing to do
        (vitals(1, compiles=True), 4),
        (vitals(2, heartbeat_age_s=4), 8),  # whoever answers is not all of it
    ],
)
def test_work_must_move(then: Vitals, still_s: float) -> None:
    vigil = Vigil()
    vigil.heard(vitals(1))
    waited(vigil, 4)
    vigil.heard(then)
    waited(vigil, 4)
    # The last word is 4 s old, which is no matter where work stands for longer.
    assert vigil.still_s == max(still_s, 4)


def test_a_compile_of_any_length_is_no_stall() -> None:
    vigil = Vigil()
    for _ in range(100):
        vigil.heard(vitals(1, compiles=True))
        waited(vigil, 1)
    vigil.heard(vitals(1, compiles=True))
    assert vigil.still_s == 0
    assert vigil.is_compiling


def test_a_stall_is_told_from_silence() -> None:
    vigil = Vigil()
    for _ in range(7):
        vigil.heard(vitals(1))
        waited(vigil, 1)
    assert vigil.complaint() == "has computed nothing for 7 s, in the middle of a step"
    assert (vigil.still_s, vigil.silent_s) == (7, 1)


def test_a_watcher_that_did_not_run_takes_it_for_nobodys_silence() -> None:
    vigil = Vigil()
    vigil.heard(vitals())
    vigil.passed(3600)
    assert vigil.still_s == LONGEST_LOOK_S


def test_a_process_that_does_not_run_is_silent_whoever_answers_for_it() -> None:
    vigil = Vigil()
    for second in range(7):
        vigil.heard(vitals(works=False, heartbeat_age_s=second))
        waited(vigil, 1)
    assert vigil.silent_s == 7


def test_who_answers_before_its_heartbeat_has_beaten_again_was_stopped_with_the_watcher() -> None:
    vigil = Vigil()
    vigil.heard(vitals())
    vigil.passed(60)
    vigil.heard(vitals(heartbeat_age_s=60))
    assert vigil.silent_s == LONGEST_LOOK_S
    waited(vigil, 1)
    vigil.heard(vitals(2, heartbeat_age_s=0.5))
    assert vigil.silent_s == 0.5


def test_what_begins_anew_owes_nothing() -> None:
    vigil = Vigil()
    vigil.heard(vitals())
    waited(vigil, 9)
    vigil.forget()
    assert waited(vigil, 9).still_s == 0
