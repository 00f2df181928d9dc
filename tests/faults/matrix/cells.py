"""Which faults strike which part in which state of a request.

SIGKILL and SIGSTOP, the two after which a process says nothing more, strike every part in every state; a
client cancels in every state. Of the others each pair of (fault, state), (part, state) and (fault, part) is
there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Fault(Enum):
    SIGKILL = "SIGKILL"
    SIGSTOP = "SIGSTOP"
    SIGTERM = "SIGTERM"
    CUT = "connection cut"
    SLOW = "slow link"
    REFUSE = "refuse connect"
    CORRUPT = "corrupt frame"
    CANCEL = "cancel"


class Part(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    ROUTER = "router"
    CLIENT = "client"


class State(Enum):
    QUEUED = "queued"
    RESERVED = "reserved"
    IN_PREFILL = "in prefill"
    IN_TRANSFER = "in transfer"
    AT_TOKEN_0 = "at token 0"
    MID_DECODE = "mid-decode"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Cell:
    fault: Fault
    part: Part
    state: State

    def __str__(self) -> str:
        return f"{self.fault.value}-{self.part.value}-{self.state.value}".replace(" ", "_")


STRUCK = (Part.PREFILL, Part.DECODE, Part.ROUTER)
WHOLE = (Fault.SIGKILL, Fault.SIGSTOP)
PAIRED = (Fault.SIGTERM, Fault.CUT, Fault.SLOW, Fault.REFUSE, Fault.CORRUPT)


def all_cells() -> list[Cell]:
    return [*_in_full(), *_paired(), *(Cell(Fault.CANCEL, Part.CLIENT, state) for state in State)]


def _in_full() -> Iterator[Cell]:
    for fault in WHOLE:
        for part in STRUCK:
            for state in State:
                yield Cell(fault, part, state)


def _paired() -> Iterator[Cell]:
    """A Latin square: fault f strikes in state s the part f + s."""
    for row, fault in enumerate(PAIRED):
        for column, state in enumerate(State):
            yield Cell(fault, STRUCK[(row + column) % len(STRUCK)], state)


def short_cells() -> set[Cell]:
    """Each fault on each part that it strikes here, each in another state: what every test run does."""
    chosen: dict[tuple[Fault, Part], Cell] = {}
    states = list(State)
    for number, cell in enumerate(all_cells()):
        if cell.fault is Fault.CORRUPT and cell.state is State.MID_DECODE:
            continue  # no KV comes any more that could be damaged
        key = (cell.fault, cell.part)
        wanted = states[(3 * len(chosen) + 5) % len(states)]
        if key not in chosen or (cell.state is wanted and number):
            chosen[key] = cell
    return set(chosen.values())
