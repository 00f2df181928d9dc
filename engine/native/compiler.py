"""Runs compilers: side by side, none beyond the time that all have, and none left behind.

Each leads a process group of its own, so that what it started ends with it. What they say goes to a file: a
pipe would be waited for as long as anybody holds its other end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence

from engine.errors import NativeUnavailable

_MAX_SAID_BYTES = 2**20


def run_compilers(commands: Sequence[Sequence[str]], deadline: float) -> list[str]:
    """What each command says, in order. `deadline` is of `time.monotonic`. When this returns or raises, all
    have ended. Raises NativeUnavailable.
    """
    # One more than there are cores: none idles while the oldest is waited for.
    at_once = len(os.sched_getaffinity(0)) + 1
    running: list[_Compiler] = []
    try:
        for index, command in enumerate(commands):
            if index >= at_once:
                running[index - at_once].finish(deadline)
            running.append(_Compiler(command))
        return [each.finish(deadline) for each in running]
    finally:
        for each in running:
            each.end()


class _Compiler:
    def __init__(self, command: Sequence[str]) -> None:
        self._name = command[0]
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `end`
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            self._said.close()
            raise NativeUnavailable(f"{self._name} cannot be run: {error}") from error

    def finish(self, deadline: float) -> str:
        """Waits. Raises NativeUnavailable."""
        try:
            code = self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise NativeUnavailable(f"{self._name} was not done in time") from None
        self._said.seek(0)
        said = self._said.read(_MAX_SAID_BYTES).decode(errors="replace")
        if code != 0:
            wrong = [line for line in said.splitlines() if "error" in line] or [f"exit {code}"]
            raise NativeUnavailable(f"{self._name} cannot compile the kernels: {wrong[0]}")
        return said

    def end(self) -> None:
        if self._process.poll() is None:  # once it is reaped, its number may be another's
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._said.close()
