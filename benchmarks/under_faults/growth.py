"""Memory of the cluster's processes over time, and what is held when nothing runs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from pdserve.client import Worker

MIB = 2**20
# Of a process's life: while it warms up it grows, which is no leak.
_SETTLING_SHARE = 0.3
_FEWEST_SAMPLES = 5


@dataclass(frozen=True, slots=True)
class Growth:
    """Of a process's own memory, without what it has mapped: KV pools in shared memory (its own, and those
    that it pushes into) count for whoever touches them, and grow until each page was touched once.
    """

    name: str
    num_samples: int
    first_mib: float
    last_mib: float
    # Least squares over the samples behind the warm-up. None: too few.
    mib_per_hour: float | None
    last_mapped_mib: float


class Memory:
    """One series for each process: a worker's successor begins anew."""

    def __init__(self) -> None:
        self._samples: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        self._mapped_mib: dict[str, float] = {}

    def note(self, name: str, pid: int) -> None:
        try:
            memory = psutil.Process(pid).memory_info()
        except psutil.NoSuchProcess:
            return
        key = f"{name} pid={pid}"
        self._samples[key].append((time.monotonic(), (memory.rss - memory.shared) / MIB))
        self._mapped_mib[key] = memory.shared / MIB

    def growths(self) -> list[Growth]:
        return [_growth(name, samples, self._mapped_mib[name]) for name, samples in self._samples.items()]


def _growth(name: str, samples: Sequence[tuple[float, float]], mapped_mib: float) -> Growth:
    settled = samples[int(_SETTLING_SHARE * len(samples)) :]
    slope = _slope(settled) if len(settled) >= _FEWEST_SAMPLES else None
    per_hour = None if slope is None else 3600 * slope
    return Growth(name, len(samples), samples[0][1], samples[-1][1], per_hour, mapped_mib)


def _slope(samples: Sequence[tuple[float, float]]) -> float:
    """Of the second value over the first."""
    mean_x = sum(x for x, _ in samples) / len(samples)
    mean_y = sum(y for _, y in samples) / len(samples)
    spread = sum((x - mean_x) ** 2 for x, _ in samples)
    return sum((x - mean_x) * (y - mean_y) for x, y in samples) / spread if spread else 0.0


def held(workers: Sequence[Worker]) -> Mapping[str, str]:
    """What workers hold though nothing runs, by their names."""
    found = {}
    for worker in workers:
        load = worker.load
        counts = {
            "blocks": load.kv_blocks_used,
            "reservations": load.num_reservations,
            "transfers": load.num_transfers,
            "running": load.num_running,
            "waiting": load.num_waiting,
        }
        words = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        if words:
            found[worker.id] = words
    return found
