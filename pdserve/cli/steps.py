"""How a start is shown: a line for each step, and on a terminal a clock beside what is still going on."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.markup import escape
from rich.status import Status

from cluster.readiness import Progress
from pdserve.cli.console import err

# Waiting for somebody else is told only where it lasts: most of it is over before it is read.
PATIENCE_S = 2.0
_WAITING = ("waits ", "waiting ")


def is_waiting(how: str) -> bool:
    return how.startswith(_WAITING)


class SteadySteps:
    """Passes steps on to `show`, those that wait only once they have stood for `patience_s`. Any thread."""

    def __init__(self, show: Callable[[str, str], None], patience_s: float = PATIENCE_S) -> None:
        self._show = show
        self._patience_s = patience_s
        # A signal's handler may tell something in the middle of a `tell` of its own thread.
        self._lock = threading.RLock()
        self._held: dict[str, threading.Timer] = {}

    def tell(self, what: str, how: str) -> None:
        with self._lock:
            held = self._held.pop(what, None)
            if held is not None:
                held.cancel()
            if not is_waiting(how):
                self._show(what, how)
                return
            timer = threading.Timer(self._patience_s, self._show_held, (what, how))
            timer.daemon = True
            self._held[what] = timer
            timer.start()

    def _show_held(self, what: str, how: str) -> None:
        with self._lock:
            if self._held.get(what) is threading.current_thread():
                del self._held[what]
                self._show(what, how)

    def close(self) -> None:
        """What is held is not shown any more."""
        with self._lock:
            for timer in self._held.values():
                timer.cancel()
            self._held.clear()


@contextmanager
def shown_steps() -> Iterator[Progress]:
    """Yields what is to be told of every step, from whatever thread."""
    # Other libraries' progress bars would run through these lines.
    os.environ["TQDM_DISABLE"] = "1"
    begun = time.monotonic()
    going_on: dict[str, str] = {}
    with Status("starting", console=err) as spinner:

        def show(what: str, how: str) -> None:
            err.print(f"[dim]{time.monotonic() - begun:5.1f}s[/]  {what:<12} {escape(how)}")
            going_on[what] = how
            waiting = [name for name, state in going_on.items() if not state.startswith("ready")]
            spinner.update(f"waiting for {', '.join(waiting)}" if waiting else "starting")

        steps = SteadySteps(show)
        try:
            yield steps.tell
        finally:
            steps.close()
