"""A whole load test: is somebody there, do the requests fit, one run or a search for the goodput."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from pdserve.bench.errors import BenchError
from pdserve.bench.serve.choice import WorkloadChoice
from pdserve.bench.serve.client import RequestFailed, ServeClient, Served
from pdserve.bench.serve.goodput import Goodput, Slo, goodput
from pdserve.bench.serve.making import make_workload
from pdserve.bench.serve.prompts import DEFAULT_VOCAB_SIZE, TokenPrompts
from pdserve.bench.serve.records import RequestRecord
from pdserve.bench.serve.run import Progress, run
from pdserve.bench.serve.summary import Summary, summarize
from pdserve.bench.serve.sweep import Crossing, Point, Search, crossing, find_goodput
from pdserve.bench.serve.workload import PlannedRequest, Workload

_TRIAL_TOKENS = 8
# Before Python 3.11, Ctrl-C is raised wherever the loop is: in the midst of a request, whose waiters hear it.
_INTERRUPTS = (asyncio.CancelledError, KeyboardInterrupt)


@dataclass(frozen=True, slots=True)
class RunResult:
    workload: Workload
    records: tuple[RequestRecord, ...]
    summary: Summary
    goodput: Goodput | None  # None: there are no objectives
    client_load: float  # cores that this process used: near 1, it measures itself


@dataclass(frozen=True, slots=True)
class Report:
    served: Served
    prompt_seed: int
    slo: Slo | None
    runs: tuple[RunResult, ...]  # in the order in which they were done
    crossing: Crossing | None  # of a search
    is_whole: bool = True  # False: it was interrupted


class RunProgress(Protocol):
    def begin(self, num_requests: int, rate: float) -> Progress:
        """A run begins."""
        ...


def _forget(_: object) -> None:
    """Nobody asks for what there is."""


class _Kept:
    """Progress that keeps what has ended."""

    def __init__(self, shown: Progress) -> None:
        self._shown = shown
        self.records: list[RequestRecord] = []

    def sent(self) -> None:
        self._shown.sent()

    def ended(self, record: RequestRecord) -> None:
        self.records.append(record)
        self._shown.ended(record)


@dataclass(frozen=True, slots=True)
class LoadTest:
    choice: WorkloadChoice
    prompt_seed: int
    vocab_size: int | None = None  # None: what the server says
    slo: Slo | None = None
    search: Search | None = None

    async def measure(
        self,
        client: ServeClient,
        progress: RunProgress,
        interrupted: Callable[[Report], None] = _forget,
    ) -> Report:
        """Raises BenchError. A cancelled one tells `interrupted` what there is by then, if there is anything:
        the requests that have ended; of a search the runs that have.
        """
        served = await client.served()
        make = self._workloads(served)
        first = make()
        check_fits(first, served)
        await _try(client, first, TokenPrompts(self._vocab_size(served), self.prompt_seed))
        whole = Report(served, self.prompt_seed, self.slo, (), None)
        if self.search is None:

            def tell(ended: RunResult) -> None:
                interrupted(replace(whole, runs=(ended,), is_whole=False))

            return replace(whole, runs=(await self._run(first, client, progress, tell),))
        runs: list[RunResult] = []
        points: list[Point] = []

        async def attainment(rate: float) -> float:
            result = await self._run(make().at_rate(rate), client, progress)
            runs.append(result)
            points.append(Point(rate, _attainment(result)))
            return points[-1].attainment

        try:
            found = await find_goodput(attainment, self.search.rates, self.search.target)
        except _INTERRUPTS:
            if runs:
                so_far = crossing(points, self.search.target)
                interrupted(replace(whole, runs=tuple(runs), crossing=so_far, is_whole=False))
            raise
        return replace(whole, runs=tuple(runs), crossing=found)

    async def _run(
        self,
        workload: Workload,
        client: ServeClient,
        progress: RunProgress,
        interrupted: Callable[[RunResult], None] = _forget,
    ) -> RunResult:
        """Tells `interrupted` of what has ended, if anything has, where it is cancelled."""
        kept = _Kept(progress.begin(len(workload.requests), workload.rate))
        began_s, began_cpu_s = time.monotonic(), time.process_time()

        def result(records: list[RequestRecord]) -> RunResult:
            load = (time.process_time() - began_cpu_s) / (time.monotonic() - began_s)
            met = None if self.slo is None else goodput(records, self.slo)
            return RunResult(workload, tuple(records), summarize(records), met, load)

        try:
            return result(await run(workload, client, kept))
        except _INTERRUPTS:
            if kept.records:
                interrupted(result(sorted(kept.records, key=lambda record: record.index)))
            raise

    def _vocab_size(self, served: Served) -> int:
        return self.vocab_size or served.vocab_size or DEFAULT_VOCAB_SIZE

    def _workloads(self, served: Served) -> Callable[[], Workload]:
        """Each is the same load with prompts of its own: the runs before have left theirs in caches. A search
        has rates of its own: at the choice's, which may be all at once, the gaps would be lost.
        """
        choice = self.choice if self.search is None else replace(self.choice, rate=None)
        num_made = 0

        def make() -> Workload:
            nonlocal num_made
            num_made += 1
            # Far from the seeds that somebody gives to other tests of the same server.
            return make_workload(choice, self._vocab_size(served), self.prompt_seed + (num_made << 32))

        return make


def _attainment(result: RunResult) -> float:
    return result.goodput.attainment if result.goodput is not None else 0.0


def check_fits(workload: Workload, served: Served) -> None:
    """Raises BenchError for a request that the model cannot hold, before anything is sent."""
    limit = served.max_model_len
    lengths = [(request.num_prompt_tokens or 0) + request.max_tokens for request in workload.requests]
    if not lengths:
        raise BenchError("the workload has no requests")
    if limit is not None and max(lengths) > limit:
        num_over = sum(length > limit for length in lengths)
        raise BenchError(
            f"{num_over} of {len(lengths)} requests are longer than the {limit} tokens that {served.model}"
            f" takes (the longest: {max(lengths)}): clip prompts and answers"
        )


async def _try(client: ServeClient, workload: Workload, prompts: TokenPrompts) -> None:
    """One small request of the same kind, so that a wrong address or kind is not told a hundred times."""
    is_text = isinstance(workload.requests[0].prompt, str)
    ids = prompts.make(_TRIAL_TOKENS)
    trial = PlannedRequest(0.0, "Hello" if is_text else ids, _TRIAL_TOKENS, None if is_text else len(ids))
    try:
        await client.send(trial, _ignore)
    except RequestFailed as error:
        raise BenchError(f"a first request fails with {error.code}: {error}") from error


def _ignore() -> None:
    """Tokens of the trial."""
