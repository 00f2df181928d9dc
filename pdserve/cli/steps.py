"""How a start is shown: a line for each step, and on a terminal a clock beside what is still going on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.status import Status

from cluster.readiness import Progress
from pdserve.cli.console import err


@contextmanager
def shown_steps() -> Iterator[Progress]:
    """Yields what is to be told of every step, from whatever thread."""
    # Other libraries' progress bars would run through these lines.
    os.environ["TQDM_DISABLE"] = "1"
    begun = time.monotonic()
    going_on: dict[str, str] = {}
    with Status("starting", console=err) as spinner:

        def tell(what: str, how: str) -> None:
            err.print(f"[dim]{time.monotonic() - begun:5.1f}s[/]  {what:<12} {how}")
            going_on[what] = how
            waiting = [name for name, state in going_on.items() if state != "ready"]
            spinner.update(f"waiting for {', '.join(waiting)}" if waiting else "starting")

        yield tell
