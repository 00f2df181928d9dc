"""Settings of the decode role."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.verify import Verify


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    # Where KV is pushed to; 0 takes any free port.
    kv_port: int = 0
    # A reservation whose sender gives no sign of life for so long is taken back.
    lease_s: float = 10.0
    # What a hand-over must be checked by at least; None: what is usual on its transport.
    verify: Verify | None = None
    # Steps that wait for a router to read them; a router further behind is cut off.
    max_pending_steps: int = 1024
    # Sequences that wait for their first chunk (a colocated worker's); more are refused.
    max_num_waiting: int = 256
    # How long `stop` lets calls end by themselves.
    stop_grace_s: float = 2.0
