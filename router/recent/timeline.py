"""One sequence's life as it is shown: moments and the times of its tokens, in ms since it was received."""

from __future__ import annotations

from array import array
from dataclasses import asdict, dataclass, field

from router.events import Moment
from router.outputs import Timings

# Of one sequence; what comes later is counted and not drawn.
MAX_DELIVERIES = 4096
_MAX_ID_LENGTH = 64


@dataclass(frozen=True, slots=True)
class Mark:
    moment: Moment
    worker: str | None
    at_ms: float


@dataclass(slots=True)
class TokenTimes:
    """Deliveries of tokens: when, and how many at once."""

    at_ms: array[float] = field(default_factory=lambda: array("f"))
    counts: array[int] = field(default_factory=lambda: array("I"))
    num_tokens: int = 0

    def add(self, at_ms: float, count: int) -> None:
        self.num_tokens += count
        if count and len(self.at_ms) < MAX_DELIVERIES:
            self.at_ms.append(at_ms)
            self.counts.append(count)

    def as_object(self, start: int) -> dict[str, object]:
        """From delivery number `start` on."""
        return {
            "start": start,
            "at_ms": [round(each, 1) for each in self.at_ms[start:]],
            "counts": self.counts[start:].tolist(),
        }


@dataclass(slots=True)
class Timeline:
    # Unique; the request's id is its client's, and shared by n sequences.
    id: str
    request_id: str
    index: int
    prompt_tokens: int
    # Monotonic, and of the wall clock: seconds.
    received_at: float
    received_time: float
    marks: list[Mark] = field(default_factory=list)
    tokens: TokenTimes = field(default_factory=TokenTimes)
    cached_tokens: int = 0
    timings: Timings | None = None
    num_resumes: int = 0
    # How it ended: a finish reason or a status code.
    outcome: str | None = None
    # The number of its last change, among all changes of all timelines.
    version: int = 0

    def since_ms(self, at: float) -> float:
        return max(0.0, (at - self.received_at) * 1000)

    def as_object(self, first_delivery: int = 0) -> dict[str, object]:
        return {
            "id": self.id,
            "request_id": self.request_id[:_MAX_ID_LENGTH],
            "index": self.index,
            "received_time": self.received_time,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.tokens.num_tokens,
            "marks": [
                {"moment": mark.moment.value, "worker": mark.worker, "at_ms": round(mark.at_ms, 1)}
                for mark in self.marks
            ],
            "tokens": self.tokens.as_object(first_delivery),
            "timings": asdict(self.timings) if self.timings is not None else None,
            "num_resumes": self.num_resumes,
            "outcome": self.outcome,
        }
