"""Which workload somebody wants, as settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from pdserve.bench.serve.workload import Limits


class Kind(Enum):
    RANDOM = "random"
    PREFIX = "prefix"
    CONVERSATION = "conversation"
    TRACE = "trace"
    DIALOGUES = "dialogues"


@dataclass(frozen=True, slots=True)
class WorkloadChoice:
    kind: Kind = Kind.RANDOM
    # A trace's, or that of dialogues.
    file: Path | None = None
    # None: 100 (of dialogues all, if there are fewer), and all of a trace.
    num_requests: int | None = None
    # Requests a second. None: 1, and a trace's own.
    rate: float | None = None
    burstiness: float = 1.0
    num_prompt_tokens: int = 512
    num_tokens: int = 128
    range_ratio: float = 0.0
    num_prefixes: int = 1
    num_prefix_tokens: int = 512
    trace_start_s: float = 0.0
    block_tokens: int | None = None
    limits: Limits = field(default_factory=Limits)
    tokenizer: Path | None = None
    # Text in place of token ids.
    is_text: bool = False
    seed: int = 0
