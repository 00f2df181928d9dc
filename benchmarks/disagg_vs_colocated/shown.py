"""How far it is: points done of all, and requests of the one that is being measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from pdserve.bench.serve.records import RequestRecord


class Shown:
    def __init__(self, bar: Progress, num_points: int) -> None:
        self._bar = bar
        self._points = bar.add_task("points", total=num_points)
        self._point: TaskID | None = None

    def say(self, what: str) -> None:
        self._bar.console.log(what)

    def begin(self, point: str, num_requests: int | None = None) -> PointShown:
        """None: it is not known how many."""
        if self._point is not None:
            self._bar.remove_task(self._point)
        self._point = self._bar.add_task(point, total=num_requests)
        return PointShown(self._bar, self._point)

    def done(self, what: str) -> None:
        self._bar.console.log(what)
        self.skip()

    def skip(self, num_points: int = 1) -> None:
        """Points that the file has."""
        self._bar.update(self._points, advance=num_points)


class PointShown:
    """A Progress of `pdserve.bench.serve.run`."""

    def __init__(self, bar: Progress, point: TaskID) -> None:
        self._bar = bar
        self._point = point

    def sent(self) -> None: ...

    def ended(self, record: RequestRecord | None = None) -> None:
        self._bar.update(self._point, advance=1)


@contextmanager
def shown(num_points: int) -> Iterator[Shown]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    # Drawn seldom: it takes from the time of the streams that are being timed.
    with Progress(
        *columns, console=console, transient=True, refresh_per_second=1, disable=not console.is_terminal
    ) as bar:
        yield Shown(bar, num_points)
