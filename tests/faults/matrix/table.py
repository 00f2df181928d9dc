"""The matrix as a table for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from tests.faults.matrix.outcome import Outcome


def in_words(outcomes: Sequence[Outcome]) -> str:
    table = Table(title=f"{len(outcomes)} cells", title_justify="left")
    for title in ("fault", "part", "state", "outcome", "tokens", "recovery s", "resumes", "leaks", "took s"):
        table.add_column(title, justify="right" if title.endswith(("s", "d")) else "left", no_wrap=True)
    for outcome in outcomes:
        cell = outcome.cell
        table.add_row(
            cell.fault.value,
            cell.part.value,
            cell.state.value,
            outcome.ends[0] or "HANGS",
            "right" if outcome.are_tokens_right else "WRONG",
            f"{outcome.recovery_s:.2f}",
            str(outcome.num_resumes),
            str(len(outcome.leaks)),
            f"{outcome.took_s:.1f}",
        )
    console = Console(width=120, color_system=None)
    with console.capture() as told:
        console.print(table)
    return told.get()
