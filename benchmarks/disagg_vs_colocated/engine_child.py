"""The process of `engine_process.py`, as others see it."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from benchmarks.disagg_vs_colocated.engine_process import Order, Settings
from pdserve.bench.child import running, start_module
from pdserve.bench.errors import BenchError

_ROOT = Path(__file__).parents[2]
_END_WITHIN_S = 20.0
_MAX_WORDS = 300


class EngineChild:
    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        """Waits until it has loaded its model. Raises BenchError."""
        self._process = process
        self._log = log
        self.answer()

    def do(self, order: Order) -> float:
        """Seconds of one prefill, or of one step; of what is endless: 0, once it is begun."""
        self.order(order)
        return self.answer()

    def order(self, order: Order) -> None:
        if self._process.stdin is None:
            raise ValueError("its pipes are needed")
        try:
            self._process.stdin.write(order.dump() + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def answer(self) -> float:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise self._ended()
        return float(json.loads(line))

    def _ended(self) -> BenchError:
        words = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return BenchError(f"an engine's process has ended: {words[-1][:_MAX_WORDS] if words else 'no words'}")


@contextmanager
def engine_child(settings: Settings) -> Iterator[EngineChild]:
    """Ends it, whatever happens. Raises BenchError."""
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as log_file, running(lambda: _start(settings, log_file), _end) as process:
            yield EngineChild(process, log)


def _start(settings: Settings, log: IO[bytes]) -> subprocess.Popen[str]:
    module = "benchmarks.disagg_vs_colocated.engine_process"
    return start_module(module, settings.dump(), stderr=log, folder=_ROOT)


def _end(process: subprocess.Popen[str]) -> None:
    """At once: nothing of it is worth waiting for."""
    process.kill()
    process.communicate(timeout=_END_WITHIN_S)
