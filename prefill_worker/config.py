"""Settings of the prefill role."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.layer_watch import MIN_GROUP_BYTES
from kv_transfer.send_queue import SenderConfig


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    # Prompts accepted and not yet handed over; more are refused.
    max_num_prefills: int = 256
    # How long `stop` lets calls and threads end by themselves.
    stop_grace_s: float = 2.0
    connect_timeout_s: float = 5.0
    # A prompt's last chunk is shipped by groups of layers of at least so many bytes.
    min_group_bytes: int = MIN_GROUP_BYTES
    sender: SenderConfig = field(default_factory=SenderConfig)
