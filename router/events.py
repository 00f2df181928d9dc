"""What happens to a request, told to whoever listens: logs, metrics, traces and tests."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from observability.logs import fields
from observability.moments import Moment

__all__ = ["LifetimeEvent", "Listener", "Moment", "log_event"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LifetimeEvent:
    moment: Moment
    request_id: str
    transfer_id: str
    worker: str | None
    # Monotonic seconds.
    at: float
    # How the request ended, with FINISHED: a finish reason or a status code.
    outcome: str | None = None
    trace_id: str | None = None


Listener = Callable[[LifetimeEvent], None]


def log_event(event: LifetimeEvent) -> None:
    told = fields(
        request_id=event.request_id,
        transfer_id=event.transfer_id,
        worker=event.worker,
        outcome=event.outcome,
        trace_id=event.trace_id,
    )
    logger.info(event.moment.value, extra=told)
