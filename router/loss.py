"""What a failed attempt means: try again on other workers, wait for room, or tell the client."""

from __future__ import annotations

import random
from enum import Enum

from pdserve.v1.errors import (
    Aborted,
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    NotFound,
    PdserveError,
    ResourceExhausted,
    Unavailable,
)

LAYOUT_MISMATCH = "LAYOUT_MISMATCH"
SLOW_READER = "SLOW_READER"
# What a worker says that drains, or has drained, or (as it refuses new work) whose engine is gone; and what
# this router says of one that gives no sign of life.
STALLED = "WORKER_STALLED"
LEAVES = "WORKER_LEAVES"
_MOVED = frozenset({"DRAINING", "STOPPING", "STOPPED", "FAILED", STALLED, LEAVES})
# Beyond any limit; after a thousand a float overflows.
_MOST_DOUBLINGS = 64


class Verdict(Enum):
    RETRY = "retry"  # costs one of the request's retries
    MOVE = "move"  # costs none: the worker leaves in good order, or others do what it is too slow for
    WAIT = "wait"  # nothing was lost, there was no room
    FINAL = "final"


_RETRIED = (Unavailable, Aborted, NotFound, FailedPrecondition, Cancelled, DeadlineExceeded, DataLoss)


class AttemptLost(Exception):
    """This attempt is over, the request is not."""

    def __init__(self, error: PdserveError, verdict: Verdict) -> None:
        super().__init__(error.message)
        self.error = error
        self.verdict = verdict


def judge(error: PdserveError) -> Verdict:
    """For an error that a worker gave, or that stands for its silence.

    A worker that says INTERNAL met a bug in this very sequence: to show it to every other worker in turn
    could take them all down.
    """
    if error.reason in (LAYOUT_MISMATCH, SLOW_READER):
        return Verdict.FINAL
    if isinstance(error, ResourceExhausted):
        return Verdict.WAIT
    if error.reason in _MOVED:
        return Verdict.MOVE
    return Verdict.RETRY if isinstance(error, _RETRIED) else Verdict.FINAL


def lost_or_left(error: PdserveError, worker: str) -> PdserveError:
    """For sequences whose worker ended its stream with `error`."""
    reason = error.reason if error.reason in _MOVED else "WORKER_LOST"
    return Unavailable(f"worker {worker} lost: {error.message}", reason=reason)


def terminal(error: PdserveError, *, num_tokens: int, num_losses: int) -> PdserveError:
    """What the client is told when the retries are spent."""
    if isinstance(error, DataLoss):
        return error
    if num_tokens:
        return Aborted(
            f"could not be resumed after {num_tokens} tokens: {error.message}", reason="RESUME_FAILED"
        )
    return Unavailable(f"lost its workers {num_losses} times: {error.message}", reason="WORKERS_LOST")


def back_off_s(num_failures: int, *, base_s: float = 0.02, limit_s: float = 1.0) -> float:
    """Doubles with each failure in a row (from 1), of which there may be any number; jittered, so that a
    crowd does not come back as one.
    """
    doubled_s = base_s * 2.0 ** min(num_failures - 1, _MOST_DOUBLINGS)
    return min(limit_s, doubled_s) * random.uniform(0.5, 1.0)
