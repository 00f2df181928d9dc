"""The named moments of a request's life. Logs, metrics, traces and tests all speak of these."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

logger = logging.getLogger(__name__)


class Moment(Enum):
    RECEIVED = "RECEIVED"
    QUEUED = "QUEUED"
    RESERVED = "RESERVED"
    PREFILL_BEGIN = "PREFILL_BEGIN"
    FIRST_TOKEN = "FIRST_TOKEN"
    PREFILL_END = "PREFILL_END"
    TRANSFER_END = "TRANSFER_END"
    DECODE_BEGIN = "DECODE_BEGIN"
    FINISHED = "FINISHED"


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


Listener = Callable[[LifetimeEvent], None]


def log_event(event: LifetimeEvent) -> None:
    # The request id is the client's text: `%r` keeps a line break in it from forging a line.
    logger.info(
        "%s request_id=%r transfer_id=%s worker=%s%s",
        event.moment.value,
        event.request_id,
        event.transfer_id,
        event.worker or "-",
        f" outcome={event.outcome}" if event.outcome else "",
    )
