"""Which ways a prefill worker has seen break, and when each may be tried again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

# Trying costs the transfer that tries: a way that breaks again and again is tried seldom.
MAX_PAUSE_S = 3600.0


@dataclass(frozen=True, slots=True)
class _Broken:
    until: float
    pause_s: float


class BrokenWays:
    """After each break the pause is twice as long. Not thread-safe."""

    def __init__(self, pause_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._pause_s = pause_s
        self._clock = clock
        self._broken: dict[tuple[str, str], _Broken] = {}

    def add(self, instance_id: str, transport: str) -> None:
        before = self._broken.get((instance_id, transport))
        pause_s = self._pause_s if before is None else min(MAX_PAUSE_S, 2 * before.pause_s)
        self._broken[instance_id, transport] = _Broken(self._clock() + pause_s, pause_s)

    def is_avoided(self, instance_id: str, transport: str) -> bool:
        broken = self._broken.get((instance_id, transport))
        return broken is not None and self._clock() < broken.until
