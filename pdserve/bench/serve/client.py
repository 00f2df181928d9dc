"""What a load test asks of a server, whichever way it speaks to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pdserve.bench.serve.workload import PlannedRequest
from pdserve.client import Timings


@dataclass(frozen=True, slots=True)
class Served:
    """None: the server does not say."""

    model: str
    max_model_len: int | None
    vocab_size: int | None


@dataclass(frozen=True, slots=True)
class Sampling:
    temperature: float = 0.0
    # Answers are as long as planned.
    ignore_eos: bool = True


@dataclass(frozen=True, slots=True)
class Answer:
    """As the server counts it; None: it does not say."""

    num_prompt_tokens: int | None
    num_cached_tokens: int | None
    num_tokens: int | None
    timings: Timings | None = None


class RequestFailed(Exception):
    """One request did not end well; the others go on."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class ServeClient(Protocol):
    async def served(self) -> Served:
        """Raises BenchError where nobody answers."""
        ...

    async def send(self, request: PlannedRequest, on_tokens: Callable[[], None]) -> Answer:
        """Streams an answer; calls `on_tokens` at once whenever tokens have come. Any number at a time.

        Raises RequestFailed. Cancelling it cancels the request.
        """
        ...
