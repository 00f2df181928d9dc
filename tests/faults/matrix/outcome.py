"""What came of a cell, and what may come of it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from engine.sampling import SamplingParams
from pdserve.client import PdserveError
from tests.faults.matrix.answer import Answer
from tests.faults.matrix.blows import put_right, strike, victim_of
from tests.faults.matrix.cells import Cell, Fault, Part
from tests.faults.matrix.rig import Rig
from tests.faults.matrix.states import SHORT, WAYS_IN, Stage
from tests.unit.engine.driving import Reference

WHOLE = "whole"
CANCELLED = "CANCELLED"
# A request's time limit: long, so that only what hangs comes to it; short where nobody but the client's own
# clock can end it.
TIMEOUT_S, STOPPED_ROUTER_TIMEOUT_S = 60.0, 8.0
GRACE_S = 3.0
_BREAKS_CONNECTION = {WHOLE, "UNAVAILABLE"}
# What a client may see when the router itself, or the way to it, is struck. A worker's loss is no client's.
_OF_ROUTER: dict[Fault, set[str]] = {
    Fault.SIGKILL: {"UNAVAILABLE"},
    Fault.SIGTERM: _BREAKS_CONNECTION,
    Fault.SIGSTOP: {WHOLE, "DEADLINE_EXCEEDED"},
    Fault.CUT: _BREAKS_CONNECTION,
    Fault.REFUSE: _BREAKS_CONNECTION,
    Fault.SLOW: {WHOLE},
    # gRPC itself calls nonsense on a connection now the one, now the other.
    Fault.CORRUPT: {*_BREAKS_CONNECTION, "INTERNAL", "DEADLINE_EXCEEDED", "CANCELLED", "UNIMPLEMENTED"},
}


@dataclass(frozen=True, slots=True)
class Outcome:
    cell: Cell
    # WHOLE, or the status that the client got; None: neither within its deadline.
    ends: tuple[str | None, ...]
    # Of a request that came when all was put right again.
    end_afterwards: str | None
    are_tokens_right: bool
    # The longest that the client waited, from the blow on.
    recovery_s: float
    num_resumes: int
    leaks: tuple[str, ...]
    took_s: float

    def problems(self) -> list[str]:
        allowed = allowed_ends(self.cell)
        found = [f"ended with {end or 'nothing: it hangs'}" for end in self.ends if end not in allowed]
        if self.end_afterwards != WHOLE:
            found.append(f"afterwards a request ended with {self.end_afterwards}")
        found += [] if self.are_tokens_right else ["wrong tokens"]
        return [*found, *(f"leak: {leak}" for leak in self.leaks)]


def allowed_ends(cell: Cell) -> set[str]:
    if cell.fault is Fault.CANCEL:
        return {CANCELLED, WHOLE}
    return _OF_ROUTER[cell.fault] if cell.part is Part.ROUTER else {WHOLE}


async def run(rig: Rig, cell: Cell, number: int, reference: Reference) -> Outcome:
    """Everything that a cell asks of the rig, which is ready before and can be made so again after."""
    began = time.monotonic()
    is_stopped_router = cell.part is Part.ROUTER and cell.fault is Fault.SIGSTOP
    stage = Stage(rig, number, cell.part, STOPPED_ROUTER_TIMEOUT_S if is_stopped_router else TIMEOUT_S)
    scene = await WAYS_IN[cell.state](stage)
    victim = victim_of(rig, cell, scene)
    struck_at = time.monotonic()
    await strike(rig, cell, scene, victim)
    rig.let_go()
    answers = [scene.answer, *scene.others]
    ends = [_end_of(answer) if await answer.ended(GRACE_S) else None for answer in answers]
    recovery_s = scene.answer.longest_pause_s(struck_at)
    for answer in answers:
        answer.cancel()
    await put_right(rig, cell, scene, victim)
    await rig.ready()
    afterwards = stage.ask(SHORT, 12)
    end_afterwards = _end_of(afterwards) if await afterwards.ended(GRACE_S) else None
    leaks = await rig.leaks()
    return Outcome(
        cell,
        tuple(ends),
        end_afterwards,
        all(_is_right(answer, reference) for answer in [*answers, afterwards]),
        recovery_s,
        scene.answer.finished.num_resumes if scene.answer.finished is not None else 0,
        tuple(leaks),
        time.monotonic() - began,
    )


def _end_of(answer: Answer) -> str:
    if answer.is_cancelled:
        return CANCELLED
    if answer.finished is not None:
        return WHOLE
    return _code(answer.error)


def _code(error: PdserveError | None) -> str:
    return error.code.name if error is not None else "an end without a status"


def _is_right(answer: Answer, reference: Reference) -> bool:
    """So far as it came; and all of it, if it is whole."""
    if answer.finished is not None and len(answer.ids) != answer.max_tokens:
        return False
    if not answer.ids:
        return True
    try:
        sampling = SamplingParams(temperature=0.9, seed=len(answer.prompt))
        reference.assert_follows(answer.prompt, answer.ids, sampling)
    except AssertionError:
        return False
    return True
