"""The matrix has the cells that it is said to have."""

from __future__ import annotations

from itertools import product

from tests.faults.matrix.cells import PAIRED, STRUCK, WHOLE, Cell, Fault, Part, State, all_cells, short_cells


def test_kills_stops_and_cancels_are_there_in_full() -> None:
    cells = set(all_cells())
    assert cells >= {Cell(*each) for each in product(WHOLE, STRUCK, State)}
    assert cells >= {Cell(Fault.CANCEL, Part.CLIENT, state) for state in State}


def test_every_pair_of_the_other_faults_is_there() -> None:
    cells = [cell for cell in all_cells() if cell.fault in PAIRED]
    assert {(cell.fault, cell.state) for cell in cells} == set(product(PAIRED, State))
    assert {(cell.part, cell.state) for cell in cells} == set(product(STRUCK, State))
    assert {(cell.fault, cell.part) for cell in cells} == set(product(PAIRED, STRUCK))


def test_no_cell_is_there_twice_and_the_short_ones_are_of_each_fault_and_part() -> None:
    cells = all_cells()
    assert len(cells) == len(set(cells)) == 84
    struck = {(cell.fault, cell.part) for cell in cells}
    assert {(cell.fault, cell.part) for cell in short_cells()} == struck
