"""Answers that are being written all the time: as one ends, the next is asked for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from pdserve.bench.errors import BenchError
from pdserve.bench.serve.client import RequestFailed, ServeClient
from pdserve.bench.serve.records import RequestRecord
from pdserve.bench.serve.workload import PlannedRequest

_BEGIN_WITHIN_S = 120.0


class Streams:
    """`make(number)`: the request number so and so, of all streams."""

    def __init__(self, client: ServeClient, count: int, make: Callable[[int], PlannedRequest]) -> None:
        self._client = client
        self._make = make
        self._num_made = 0
        self._begun = [asyncio.Event() for _ in range(count)]
        self._tasks: list[asyncio.Task[None]] = []
        # Of each answer: when it was asked for, and when its tokens came.
        self._answers: list[tuple[float, list[float]]] = []

    async def begin(self) -> None:
        """Until every stream has a token. Raises BenchError."""
        self._tasks = [asyncio.create_task(self._run(event)) for event in self._begun]
        begun = asyncio.create_task(self._all_begun())
        await asyncio.wait(
            {begun, *self._tasks}, timeout=_BEGIN_WITHIN_S, return_when=asyncio.FIRST_COMPLETED
        )
        if not begun.done():
            begun.cancel()
            self.check()
            raise BenchError(f"streams do not begin within {_BEGIN_WITHIN_S:g} s")

    async def _all_begun(self) -> None:
        for event in self._begun:
            await event.wait()

    def check(self) -> None:
        """Raises what a stream died of."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def end(self, began: float) -> list[RequestRecord]:
        """What came of all answers, those that were cut off by this too; seconds since `began`."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return [_record(index, *answer, began) for index, answer in enumerate(self._answers)]

    async def _run(self, begun: asyncio.Event) -> None:
        while True:
            number, self._num_made = self._num_made, self._num_made + 1
            arrivals: list[float] = []
            self._answers.append((time.monotonic(), arrivals))

            def note(arrivals: list[float] = arrivals) -> None:
                arrivals.append(time.monotonic())
                begun.set()

            try:
                await self._client.send(self._make(number), note)
            except RequestFailed as error:
                raise BenchError(f"a stream failed with {error.code}: {error}") from error


def _record(index: int, asked: float, arrivals: list[float], began: float) -> RequestRecord:
    times = tuple(each - began for each in arrivals)
    return RequestRecord(
        index=index,
        scheduled_s=asked - began,
        sent_s=asked - began,
        ended_s=times[-1] if times else asked - began,
        arrivals_s=times,
        num_prompt_tokens=0,
        num_cached_tokens=None,
        num_tokens=len(times),
        failure=None,
        timings=None,
    )
