"""What came of a cell, and what may come of it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from engine.sampling import SamplingParams
from pdserve.client import PdserveError
from tests.faults.matrix.answer import Answer
from tests.faults.matrix.blows import put_right, strike, victim_of
from tests.faults.matrix.cells import Cell, Fault, Part, State
from tests.faults.matrix.rig import Rig
from tests.faults.matrix.states import SHORT, WAYS_IN, Stage
from tests.unit.engine.driving import Reference

WHOLE = "whole"
CANCELLED = "CANCELLED"
# A request's time limit: long, so that only what hangs comes to it; short where nobody but the client's own
# clock can end it.
TIMEOUT_S, STOPPED_ROUTER_TIMEOUT_S = 60.0, 8.0
GRACE_S = 3.0
_FEW = 100
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
    # Where a guard was not seen at work though it had to be.
    unseen: tuple[str, ...]
    took_s: float

    def problems(self) -> list[str]:
        allowed = allowed_ends(self.cell)
        found = [f"ended with {end or 'nothing: it hangs'}" for end in self.ends if end not in allowed]
        if self.end_afterwards != WHOLE:
            found.append(f"afterwards a request ended with {self.end_afterwards}")
        found += [] if self.are_tokens_right else ["wrong tokens"]
        return [*found, *(f"leak: {leak}" for leak in self.leaks), *self.unseen]


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
    waste = await Waste.since(rig, scene.answer) if _ends_its_request(cell) else None
    num_damaged_before = rig.num_damaged()
    struck_at = time.monotonic()
    await strike(rig, cell, scene, victim)
    rig.let_go()
    answers = [scene.answer, *scene.others]
    ends = [_end_of(answer) if await answer.ended(GRACE_S) else None for answer in answers]
    recovery_s = scene.answer.longest_pause_s(struck_at)
    num_damaged = rig.num_damaged() - num_damaged_before
    for answer in answers:
        answer.cancel()
    await put_right(rig, cell, scene, victim)
    await rig.ready()
    leaks = await rig.leaks()
    unseen = await waste.complaints(rig) if waste is not None else []
    afterwards = stage.ask(SHORT, 12)
    end_afterwards = _end_of(afterwards) if await afterwards.ended(GRACE_S) else None
    leaks += await rig.leaks()
    resumed = [each for each in answers if each.finished and each.finished.num_resumes]
    if num_damaged and not resumed:
        unseen.append("damaged KV was taken for good")
    return Outcome(
        cell,
        tuple(ends),
        end_afterwards,
        all(_is_right(answer, reference) for answer in [*answers, afterwards]),
        recovery_s,
        scene.answer.finished.num_resumes if scene.answer.finished is not None else 0,
        tuple(leaks),
        tuple(unseen),
        time.monotonic() - began,
    )


def _ends_its_request(cell: Cell) -> bool:
    """While it decodes, by a blow that its decode worker must hear of."""
    is_kill = cell.fault is Fault.SIGKILL and cell.part is Part.ROUTER
    return cell.state is State.MID_DECODE and (is_kill or cell.fault is Fault.CANCEL)


@dataclass(frozen=True, slots=True)
class Waste:
    """Tokens that are decoded for a client that is gone."""

    num_before: int
    num_left: int

    @classmethod
    async def since(cls, rig: Rig, answer: Answer) -> Waste:
        num_before = await rig.num_decoded()
        return cls(num_before, answer.max_tokens - len(answer.ids))

    async def complaints(self, rig: Rig) -> list[str]:
        """When nothing runs any more. A few that were on their way, and of others, do not matter."""
        num_more = await rig.num_decoded() - self.num_before
        return ["decoding went on for nobody, to the end"] if num_more > self.num_left - _FEW else []


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
