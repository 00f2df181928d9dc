"""How fast a worker computes prompts, at its best of late: what bounds from below how long one takes.

A prompt is refused by this estimate, so it errs on the side of hope. A faster prompt counts at once, a slower
one (it had neighbours, or a busy core) by a tenth; short prompts, whose time is mostly something else, do not
count; and at the end the pace is taken to be twice as good. What was refused tells nothing new: so a worker
that is idle is tried again some time after the last prompt that counted, which may have met a compile.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_MIN_TOKENS = 256
_SLOWER = 0.1
_HOPE = 2.0
# Of a worker that is idle.
_HOLDS_S = 60.0


class Pace:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._tokens_per_s: float | None = None
        self._clock = clock
        self._noted_at = 0.0

    def note(self, num_tokens: int, prefill_s: float) -> None:
        """`num_tokens` were computed, those of the cache not counted."""
        if num_tokens < _MIN_TOKENS or prefill_s <= 0:
            return
        seen, before = num_tokens / prefill_s, self._tokens_per_s
        self._noted_at = self._clock()
        is_better = before is None or seen > before
        self._tokens_per_s = seen if before is None or is_better else before + _SLOWER * (seen - before)

    def least_s(self, num_tokens: int, is_idle: bool = False) -> float:
        """0 while nothing is known. `is_idle`: no prompt is out from which news would come."""
        is_old = is_idle and self._clock() - self._noted_at > _HOLDS_S
        if self._tokens_per_s is None or is_old:
            return 0.0
        return num_tokens / (_HOPE * self._tokens_per_s)
