"""How much is measured, and of what. What changes a figure is kept beside the results."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from pdserve.bench.serve.goodput import Slo
from router.config import QueueOrder

MODEL = "smollm2-135m"
# The same for all: of prompt and answer together.
MAX_MODEL_LEN = 8192
MAX_NUM_SEQS = 64
CHUNK_TOKENS = 512
AGING_S = 30.0
TARGET = 0.9
SLOS = (Slo(ttft_ms=2000, tpot_ms=40), Slo(ttft_ms=4000, tpot_ms=60), Slo(4000, 60, tbt_ms=100))
MAX_PROMPT_TOKENS, MAX_TOKENS = 4000, 500
# Where the conversation trace is typical.
TRACE_START_S = 1020.0
STALL_MS = 100.0


class Part(Enum):
    UNLOADED = "unloaded"
    INTERFERENCE = "interference"
    GOODPUT = "goodput"


class Ordering(Enum):
    """Whose prompt goes next. The router's queue has two orders; in the third, prefill workers look again
    before each chunk, so a short prompt goes before the rest of a long one.
    """

    FCFS = "fcfs"
    SHORTEST = "shortest"
    LEAST_LEFT = "least-left"

    @property
    def queue(self) -> QueueOrder:
        return QueueOrder.FCFS if self is Ordering.FCFS else QueueOrder.SHORTEST

    @property
    def prefill(self) -> str:
        return "shortest" if self is Ordering.LEAST_LEFT else "fcfs"

    @property
    def backlog_tokens(self) -> int:
        """A worker's next prompt is chosen when it is through with one, not before; or all are there."""
        return 65536 if self is Ordering.LEAST_LEFT else 1

    @property
    def turn_tokens(self) -> int | None:
        """Of a prompt that are computed before the next choice. None: all."""
        return CHUNK_TOKENS if self is Ordering.LEAST_LEFT else None


class System(Enum):
    DISAGGREGATED = "1p1d"
    # The prefill worker has a thread for each core, and what the decode worker leaves of its own.
    SHARING = "1p1d-sharing"
    COLOCATED = "colocated"
    VLLM = "vllm"


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a run measures; a rerun of the same file has to be of the same sizes."""

    num_warm: int = 6
    unloaded_tokens: tuple[int, ...] = (16, 128, 512, 2048)
    unloaded_answer_tokens: int = 32
    unloaded_rounds: int = 5
    num_streams: int = 4
    stream_tokens: tuple[int, int] = (64, 600)  # of prompt and answer
    long_tokens: tuple[int, int] = (3000, 8)
    long_every_s: float = 4.0
    num_long: int = 12  # in a segment
    num_alone: int = 4
    quiet_s: float = 12.0
    num_segments: int = 2
    num_requests: int = 100
    prefill_tokens: tuple[int, ...] = (16, 128, 512, 1024, 2048, 3072, 4096)
    # batch, context
    steps: tuple[tuple[int, int], ...] = (
        (1, 64), (1, 1024), (4, 64), (4, 1024), (8, 64), (8, 1024), (16, 64), (16, 1024), (32, 64), (32, 512),
    )  # fmt: skip
    num_steps: int = 40
    rate_rounds: int = 3
    num_rates: int = 6


FULL = Sizes()
QUICK = Sizes(
    num_warm=2,
    unloaded_tokens=(16, 128),
    unloaded_answer_tokens=8,
    unloaded_rounds=2,
    stream_tokens=(64, 100),
    long_tokens=(512, 8),
    long_every_s=2.0,
    num_long=3,
    num_alone=2,
    quiet_s=3.0,
    num_segments=1,
    num_requests=12,
    prefill_tokens=(16, 512, 2048),
    steps=((1, 64), (1, 512), (8, 64), (8, 512)),
    num_steps=16,
    rate_rounds=1,
    num_rates=2,
)


@dataclass(frozen=True, slots=True)
class Wanted:
    sizes: Sizes
    parts: tuple[Part, ...]
    systems: tuple[System, ...]
    orders: tuple[Ordering, ...]
    seeds: tuple[int, ...]
    rates: tuple[float, ...] | None  # requests a second; None: around the ideal's goodput
    trace: Path | None  # None: one is drawn that is like Azure's
    cores: tuple[int, ...]
    vllm_python: Path | None
