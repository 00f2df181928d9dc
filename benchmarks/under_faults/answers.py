"""What a client saw of one request: its tokens, when they came, and how it ended."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

from benchmarks.under_faults.asks import Ask
from pdserve.client import Client, Delta, Finished, PdserveError


class End(Enum):
    WHOLE = "whole"
    CANCELLED = "cancelled by the client"
    FAILED = "failed"


@dataclass(slots=True)
class Answer:
    ask: Ask
    # Monotonic seconds.
    asked_at: float
    ids: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    end: End | None = None
    error: str = ""
    num_resumes: int = 0

    @property
    def ttft_s(self) -> float | None:
        return self.arrivals[0] - self.asked_at if self.arrivals else None

    def pauses(self) -> list[tuple[float, float]]:
        """Between deliveries: (when it ended, seconds)."""
        return [(later, later - earlier) for earlier, later in pairwise(self.arrivals)]


async def answered(client: Client, ask: Ask, timeout_s: float, cancel_after_s: float | None = None) -> Answer:
    """Never raises for what becomes of the request. None: it is not cancelled."""
    answer = Answer(ask, time.monotonic())
    reading = asyncio.ensure_future(_read(client, answer, timeout_s))
    done, _ = await asyncio.wait({reading}, timeout=cancel_after_s)
    if not done:
        reading.cancel()
        await asyncio.wait({reading})
        if answer.end is None:
            answer.end = End.CANCELLED
    else:
        reading.result()
    return answer


async def _read(client: Client, answer: Answer, timeout_s: float) -> None:
    options = answer.ask.options()
    try:
        async with aclosing(
            client.generate_stream(answer.ask.prompt, timeout=timeout_s, **options)
        ) as stream:
            async for event in stream:
                if isinstance(event, Delta) and event.token_ids:
                    answer.ids.extend(event.token_ids)
                    answer.arrivals.append(time.monotonic())
                elif isinstance(event, Finished):
                    answer.num_resumes = event.num_resumes
                    answer.end = End.WHOLE
    except PdserveError as error:
        answer.end, answer.error = End.FAILED, f"{error.code.name}: {error.message}"
    if answer.end is None:
        answer.end, answer.error = End.FAILED, "the stream ended without an end"
