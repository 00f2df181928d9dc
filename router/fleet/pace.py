"""How fast a worker computes prompts, at its best of late: what bounds from below how long one takes.

A prompt is refused by this estimate, so it errs on the side of hope. A faster prompt counts at once, a slower
one (it had neighbours, or a busy core) by a tenth; short prompts, whose time is mostly something else, do not
count; and at the end the pace is taken to be twice as good.
"""

from __future__ import annotations

_MIN_TOKENS = 256
_SLOWER = 0.1
_HOPE = 2.0


class Pace:
    def __init__(self) -> None:
        self._tokens_per_s: float | None = None

    def note(self, num_tokens: int, prefill_s: float) -> None:
        """`num_tokens` were computed, those of the cache not counted."""
        if num_tokens < _MIN_TOKENS or prefill_s <= 0:
            return
        seen, before = num_tokens / prefill_s, self._tokens_per_s
        is_better = before is None or seen > before
        self._tokens_per_s = seen if before is None or is_better else before + _SLOWER * (seen - before)

    def least_s(self, num_tokens: int) -> float:
        """0 while nothing is known."""
        return 0.0 if self._tokens_per_s is None else num_tokens / (_HOPE * self._tokens_per_s)
