"""How far it is, on stderr, where that is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

console = Console(stderr=True)


@contextmanager
def shown(title: str, total: float | None) -> Iterator[Callable[[], None]]:
    """Yields what is called for each request that has ended. None: it is not known how many there will be."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Drawn seldom: it takes from the time of the streams.
    with Progress(
        *columns, console=console, transient=True, refresh_per_second=2, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.update(task, advance=1)
