"""The open loop: each request is sent at its time, whatever is outstanding then."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from pdserve.bench.serve.client import RequestFailed, ServeClient
from pdserve.bench.serve.records import Failure, RequestRecord
from pdserve.bench.serve.workload import PlannedRequest, Workload

# The first request is not late because tasks are still being made.
_LEAD_S = 0.05


class Progress(Protocol):
    def sent(self) -> None: ...

    def ended(self, record: RequestRecord) -> None: ...


class NoProgress:
    def sent(self) -> None: ...

    def ended(self, record: RequestRecord) -> None: ...


async def run(
    workload: Workload, client: ServeClient, progress: Progress | None = None
) -> list[RequestRecord]:
    """One record for each request, in the workload's order; returns when the last has ended.

    A request that fails is a record, no exception. Cancelling it cancels every request.
    """
    shown = progress or NoProgress()
    began = time.monotonic() + _LEAD_S
    tasks: list[asyncio.Task[RequestRecord]] = []
    try:
        for index, request in enumerate(workload.requests):
            delay = began + request.at_s - time.monotonic()
            if delay > 0:
                await asyncio.sleep(delay)
            tasks.append(asyncio.create_task(_ask(index, request, client, began, shown)))
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _ask(
    index: int, request: PlannedRequest, client: ServeClient, began: float, progress: Progress
) -> RequestRecord:
    arrivals: list[float] = []
    answer, failure = None, None
    sent_s = time.monotonic() - began
    progress.sent()
    try:
        answer = await client.send(request, lambda: arrivals.append(time.monotonic() - began))
    except RequestFailed as error:
        failure = Failure(error.code, str(error))
    if failure is None and not arrivals:
        failure = Failure("EMPTY", "the answer has no tokens")
    num_prompt_tokens = answer.num_prompt_tokens if answer is not None else None
    record = RequestRecord(
        index=index,
        scheduled_s=request.at_s,
        sent_s=sent_s,
        ended_s=time.monotonic() - began,
        arrivals_s=tuple(arrivals),
        num_prompt_tokens=num_prompt_tokens or request.num_prompt_tokens or 0,
        num_cached_tokens=answer.num_cached_tokens if answer is not None else None,
        num_tokens=(answer.num_tokens if answer is not None else None) or len(arrivals),
        failure=failure,
        timings=answer.timings if answer is not None else None,
    )
    progress.ended(record)
    return record
