"""The progress of `pdserve bench serve`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from pdserve.bench.serve.records import RequestRecord
from pdserve.cli.console import err


class RunsShown:
    """A bar of requests that have ended, with how many are out and have failed."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task: TaskID | None = None
        self._title = ""
        self._num_out = self._num_failed = 0

    def begin(self, num_requests: int, rate: float) -> RunsShown:
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._title = f"{rate:.3g} requests/s"
        self._num_out = self._num_failed = 0
        self._task = self._bar.add_task(self._title, total=num_requests)
        return self

    def sent(self) -> None:
        self._num_out += 1
        self._show()

    def ended(self, record: RequestRecord) -> None:
        self._num_out -= 1
        self._num_failed += not record.is_ok
        self._show(advance=1)

    def _show(self, advance: int = 0) -> None:
        failed = f", [red]{self._num_failed} failed[/]" if self._num_failed else ""
        if self._task is not None:
            title = f"{self._title}, {self._num_out} out{failed}"
            self._bar.update(self._task, advance=advance, description=title)


@contextmanager
def shown_runs() -> Iterator[RunsShown]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Drawn seldom: it takes from the time of the streams that are being timed.
    with Progress(
        *columns, console=err, transient=True, refresh_per_second=2, disable=not err.is_terminal
    ) as bar:
        yield RunsShown(bar)
