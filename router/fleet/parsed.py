"""Messages of other parts. In place of bytes that are none gRPC hands on None, and logs the error."""

from __future__ import annotations

from typing import TypeVar

from pdserve.v1.errors import Unavailable

M = TypeVar("M")


def parsed(message: M | None) -> M:
    """Raises Unavailable: whoever sent this, others may do better."""
    if message is None:
        raise Unavailable("it sent bytes that are no message", reason="MALFORMED")
    return message
