"""What is counted and traced of work that did not end well."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.v1.errors import (
    Aborted,
    Cancelled,
    DeadlineExceeded,
    PdserveError,
    ResourceExhausted,
    Unavailable,
)
from router.deadline import Deadline
from router.failure import FAILURES, Failure, failure_of
from router.loss import AttemptLost, judge

LOST = Unavailable("gone", reason="STOPPING")


def lost(error: PdserveError) -> AttemptLost:
    return AttemptLost(error, judge(error))


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (
            ResourceExhausted("full", reason="QUEUE_FULL"),
            ("RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED QUEUE_FULL"),
        ),
        (Aborted("over"), ("ABORTED", "ABORTED")),
        # An attempt's end is that of what it was lost to.
        (lost(LOST), ("UNAVAILABLE", "UNAVAILABLE STOPPING")),
        (Cancelled("by the worker"), ("CANCELLED", "CANCELLED")),
        (asyncio.CancelledError(), ("CANCELLED", "CANCELLED")),
        (GeneratorExit(), ("CANCELLED", "CANCELLED")),
        # What it says may quote a client.
        (KeyError("a prompt"), ("INTERNAL", "KeyError")),
    ],
)
def test_every_end_has_a_code_and_a_label(error: BaseException, failure: tuple[str, str]) -> None:
    assert isinstance(error, FAILURES)
    assert failure_of(error) == Failure(*failure)


async def test_what_the_deadline_cancelled_is_late_and_not_cancelled() -> None:
    deadline = Deadline(0.001)
    seen: list[Failure] = []

    async def work() -> None:
        async with deadline:
            try:
                await asyncio.Event().wait()
            except FAILURES as error:
                seen.append(failure_of(error, deadline))
                raise

    with pytest.raises(DeadlineExceeded):
        await work()
    assert [failure.code for failure in seen] == ["DEADLINE_EXCEEDED"]


async def test_a_client_that_gives_up_by_its_own_clock_a_little_sooner_is_late_too() -> None:
    async with Deadline(60.0, early_s=61.0) as deadline:
        assert failure_of(asyncio.CancelledError(), deadline).code == "DEADLINE_EXCEEDED"
        assert not deadline.has_passed
    async with Deadline(60.0, early_s=1.0) as deadline:
        assert failure_of(asyncio.CancelledError(), deadline).code == "CANCELLED"


async def test_a_cancel_before_the_deadline_is_a_cancel() -> None:
    assert failure_of(asyncio.CancelledError(), Deadline(60.0)).code == "CANCELLED"
