"""Each fault, on each part, in each state of a request: it ends in success or in a typed status in bounded
time, its tokens are the model's, and nothing is held by anybody afterwards.

`make test-faults` runs every cell, `make test` some; both print the table.
"""

from __future__ import annotations

import pytest

from tests.faults.matrix.cells import Cell, all_cells, short_cells
from tests.faults.matrix.outcome import Outcome, run
from tests.faults.matrix.rig import Rig
from tests.unit.engine.driving import Reference

CELLS = all_cells()
SHORT = short_cells()


def _marked(number: int, cell: Cell) -> object:
    return pytest.param(number, cell, id=str(cell), marks=() if cell in SHORT else pytest.mark.full)


@pytest.mark.timeout(300)  # processes start, which takes long where much else runs
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("number", "cell"), [_marked(number, cell) for number, cell in enumerate(CELLS)])
async def test_a_fault_ends_no_request_without_a_word_and_leaves_nothing(
    rig: Rig, reference: Reference, outcomes: list[Outcome], number: int, cell: Cell
) -> None:
    await rig.ready()
    outcome = await run(rig, cell, number, reference)
    outcomes.append(outcome)
    assert outcome.problems() == []
