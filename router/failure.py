"""How work ended that did not end well: the same for those who count and for those who trace."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from pdserve.v1.errors import PdserveError
from router.deadline import Deadline
from router.loss import AttemptLost

# To be caught around the work, told, and raised again: leaving early is a cancel, by task or by generator.
FAILURES = (Exception, asyncio.CancelledError, GeneratorExit)


@dataclass(frozen=True, slots=True)
class Failure:
    code: str  # of the status that it is, or would be
    label: str  # the code with its reason; of a bug its type, for the message may quote a client


def failure_of(error: BaseException, deadline: Deadline | None = None) -> Failure:
    """`deadline`: the one that may have cancelled the work."""
    if isinstance(error, AttemptLost):
        error = error.error
    if isinstance(error, PdserveError):
        return Failure(error.code.name, error.label)
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        is_late = deadline is not None and deadline.is_over
        code = "DEADLINE_EXCEEDED" if is_late else "CANCELLED"
        return Failure(code, code)
    return Failure("INTERNAL", type(error).__name__)
