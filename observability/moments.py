"""The named moments of a request's life. Logs, metrics, traces and tests all speak of these."""

from __future__ import annotations

from enum import Enum


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
