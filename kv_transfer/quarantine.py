"""What a decode worker cannot give out again because a sender might still write it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Of one stream."""

    stream: object
    num_blocks: int
    # Of the oldest.
    age_s: float
