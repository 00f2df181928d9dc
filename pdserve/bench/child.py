"""A process of the benchmark's own that is ended whatever happens, Ctrl-C while it starts included."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from trust.secret import Secret
from trust.trust import Trust

_END_WITHIN_S = 20.0


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


@contextmanager
def trusted_child(module: str, settings: str, secret: Secret) -> Iterator[subprocess.Popen[str]]:
    """`python -m module settings`, which reads the secret first and ends when its stdin closes."""

    def start() -> subprocess.Popen[str]:
        process = start_module(module, settings)
        _tell_secret(process, secret)
        return process

    with running(start, _end_by_itself) as process:
        yield process


def start_module(
    module: str, settings: str, *, stderr: IO[bytes] | None = None, folder: Path | None = None
) -> subprocess.Popen[str]:
    """Spoken to by its stdin and stdout, on one thread; in a session of its own: Ctrl-C is ours to handle."""
    return subprocess.Popen(
        [sys.executable, "-m", module, settings],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def _end_by_itself(process: subprocess.Popen[str]) -> None:
    """When its stdin closes, unless it hangs."""
    try:
        process.communicate(timeout=_END_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
    except BrokenPipeError:
        process.wait()


def _tell_secret(process: subprocess.Popen[str], secret: Secret) -> None:
    """As the first line on its stdin: a command line can be read by others. Nothing, where it has ended."""
    if process.stdin is None:
        raise ValueError("its pipes are needed")
    try:
        process.stdin.write(secret.text + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return


def told_trust() -> Trust:
    """In the child: what it was told."""
    return Trust(Secret(sys.stdin.readline().strip()))


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
