"""Whether somebody who is said to live does: by what it says of itself, and by its silence.

Time is counted by who watches and only while that one runs itself: a watcher that was stopped or starved for
a while must not take its own absence for the silence of all others.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.v1 import cluster_pb2

# More than this between two looks of a watcher that looks several times a second is its own absence.
LONGEST_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Vitals:
    progress: int
    # While it works and does not compile, `progress` must move.
    is_working: bool
    is_compiling: bool
    heartbeat_age_s: float
    # 0: it has not made any yet.
    step_s: float


def vitals_of(message: cluster_pb2.Vitals) -> Vitals:
    return Vitals(
        progress=message.progress,
        is_working=message.is_working,
        is_compiling=message.is_compiling,
        heartbeat_age_s=message.heartbeat_age_ms / 1000,
        step_s=message.step_ms / 1000,
    )


class Vigil:
    """Begins with the first word: before that there is nothing to miss."""

    def __init__(self, longest_look_s: float = LONGEST_LOOK_S) -> None:
        self._longest_look_s = longest_look_s
        self._last: Vitals | None = None
        self._silent_s = 0.0
        self._stalled_s = 0.0

    def heard(self, vitals: Vitals) -> None:
        """A heartbeat that is older than what the watcher has seen go by stood still with the watcher: where
        a machine was stopped and goes on, a worker may answer before its heartbeat has beaten again."""
        must_move = vitals.is_working and not vitals.is_compiling
        if not must_move or self._last is None or self._last.progress != vitals.progress:
            self._stalled_s = 0.0
        self._silent_s = min(self._silent_s, vitals.heartbeat_age_s)
        self._last = vitals

    def passed(self, elapsed_s: float) -> None:
        """To be told in short pieces: of a long one most is taken for the watcher's own absence."""
        if self._last is not None:
            elapsed_s = min(elapsed_s, self._longest_look_s)
            self._silent_s += elapsed_s
            self._stalled_s += elapsed_s

    def forget(self) -> None:
        """What is heard next comes from a new beginning."""
        self._last, self._silent_s, self._stalled_s = None, 0.0, 0.0

    @property
    def still_s(self) -> float:
        """For so long there is no sign of life of one kind or the other."""
        if self._last is None:
            return 0.0
        return max(self.silent_s, self._stalled_s if self._last.is_working else 0.0)

    @property
    def silent_s(self) -> float:
        """For so long it does not answer, or its process does not run."""
        return self._silent_s

    @property
    def step_s(self) -> float:
        return self._last.step_s if self._last is not None else 0.0

    @property
    def is_compiling(self) -> bool:
        return self._last is not None and self._last.is_compiling

    def complaint(self) -> str:
        """What `still_s` is about."""
        if self._last is not None and self._last.is_working and self._stalled_s > self._silent_s:
            return f"has computed nothing for {self.still_s:.0f} s, in the middle of a step"
        return f"has given no sign of life for {self.still_s:.0f} s"
