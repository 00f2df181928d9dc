"""Whose client reads too slowly: tokens that wait for clients are kept in memory, and that is bounded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pdserve.v1.errors import DeadlineExceeded, PdserveError, ResourceExhausted
from router.attempt import Attempt
from router.loss import SLOW_READER


class SlowReaders:
    def __init__(self, max_unread_tokens: int) -> None:
        """`max_unread_tokens`: of all requests together."""
        self.num_cut = 0
        self._max_unread = max_unread_tokens

    def to_cut(self, attempts: Iterable[Attempt]) -> Iterator[tuple[Attempt, PdserveError]]:
        """Whose time is over; and whoever is furthest behind, as long as more is unread than may be kept.

        Their tasks wait for their clients, who hear of it with the next thing they read.
        """
        unread = []
        for attempt in tuple(attempts):
            if attempt.request.deadline.has_passed:
                yield attempt, DeadlineExceeded("its time is over")
            elif attempt.inbox.num_unread:
                unread.append(attempt)
        num_unread = sum(attempt.inbox.num_unread for attempt in unread)
        for attempt in sorted(unread, key=lambda each: each.inbox.num_unread, reverse=True):
            if num_unread <= self._max_unread:
                return
            behind = attempt.inbox.num_unread
            num_unread -= behind
            self.num_cut += 1
            yield attempt, ResourceExhausted(f"its client is {behind} tokens behind", reason=SLOW_READER)
