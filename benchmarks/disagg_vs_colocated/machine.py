"""Where and when the file's points were measured."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import cast

from benchmarks.disagg_vs_colocated.results import Results

_KEY = "runs"


def note_run(results: Results, load: float) -> None:
    """`load`: how many processes wanted a core when it began."""
    runs = cast("list[object]", results.get(_KEY) or [])
    begun = datetime.now().astimezone().isoformat(timespec="seconds")
    results.put(_KEY, [*runs, {"begun": begun, "processor": _processor(), "load": round(load, 1)}])


def lines(results: Results) -> Iterator[str]:
    for run in cast("list[dict[str, object]]", results.get(_KEY) or []):
        yield f"{run['begun']}: {run['processor']}, {run['load']} processes wanted a core when it began."
    yield ""


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()
