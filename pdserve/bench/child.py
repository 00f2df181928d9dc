"""A process of the benchmark's own that is ended whatever happens, Ctrl-C while it starts included."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trust.secret import Secret


@contextmanager
def running(
    start: Callable[[], subprocess.Popen[str]], end: Callable[[subprocess.Popen[str]], None]
) -> Iterator[subprocess.Popen[str]]:
    """On the main thread only: it is the one that hears Ctrl-C."""
    process: subprocess.Popen[str] | None = None
    try:
        with _interrupts_wait():
            process = start()
        yield process
    finally:
        if process is not None:
            end(process)


def tell_secret(process: subprocess.Popen[str], secret: Secret) -> None:
    """As the first line on its stdin: a command line can be read by others. Nothing, where it has ended."""
    if process.stdin is None:
        raise ValueError("its pipes are needed")
    try:
        process.stdin.write(secret.text + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Ctrl-C is raised behind it: a process that has just been started and has no name yet would be lost."""
    told: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: told.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if told:
        raise KeyboardInterrupt
