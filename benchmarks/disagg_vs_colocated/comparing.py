"""One system after the other, each visited once for every seed: so a machine that drifts drifts for all, and
after the first round there is a whole picture. What the file has is not started again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from benchmarks.disagg_vs_colocated import goodput, interference, phase_rates, unloaded
from benchmarks.disagg_vs_colocated.cores import leave
from benchmarks.disagg_vs_colocated.results import Results
from benchmarks.disagg_vs_colocated.settings import Ordering, Part, Sizes, System, Wanted
from benchmarks.disagg_vs_colocated.shown import Shown, shown
from benchmarks.disagg_vs_colocated.systems import Open, running
from benchmarks.disagg_vs_colocated.trace_load import TraceLoad
from pdserve.bench.serve.prompts import DEFAULT_VOCAB_SIZE, TokenPrompts
from pdserve.bench.serve.run import run
from pdserve.bench.serve.workload import PlannedRequest, Workload

# Asked for before anything is timed: connections are made, and memory is touched for the first time.
_WARM_TOKENS, _WARM_ANSWER = 2048, 8
# What a point takes beside its requests' arrivals: the last ones' answers.
_TAIL_S = 20.0


@dataclass(frozen=True, slots=True)
class Visit:
    system: System
    order: Ordering
    seed: int
    parts: tuple[Part, ...]


def compare(results: Results, wanted: Wanted, load: TraceLoad) -> None:
    """Measures what the file lacks. Raises BenchError."""
    with shown(_num_points(wanted)) as progress:
        rates: tuple[float, ...] = ()
        if Part.GOODPUT in wanted.parts:
            phase_rates.measure(results, wanted.sizes, wanted.cores, progress)
            rates = goodput.chosen_rates(results, wanted, load)
            progress.say(_outlook(results, wanted, rates))
        for visit in _visits(wanted):
            points = _points(visit, wanted.sizes, rates)
            if all(point in results for point in points):
                progress.skip(len(points))
                continue
            ours = running(visit.system, visit.order, wanted.cores, wanted.vllm_python, progress.say)
            with ours as open_client:
                leave(wanted.cores)
                asyncio.run(_measure(results, visit, open_client, wanted, load, progress, rates))


def pairs(wanted: Wanted) -> list[tuple[System, Ordering]]:
    """vLLM has an order of its own, the first."""
    return [
        (system, order)
        for system in wanted.systems
        for order in (wanted.orders if system is not System.VLLM else (Ordering.FCFS,))
    ]


def _visits(wanted: Wanted) -> list[Visit]:
    """Only the trace makes a queue, and is asked for with each seed: the other parts are measured once."""
    visits, seen = [], set()
    for seed in wanted.seeds:
        for system, order in pairs(wanted):
            parts = [part for part in wanted.parts if part is Part.GOODPUT or system not in seen]
            seen.add(system)
            if parts:
                visits.append(Visit(system, order, seed, tuple(parts)))
    return visits


def _points(visit: Visit, sizes: Sizes, rates: tuple[float, ...]) -> list[str]:
    """Their keys."""
    found: list[str] = []
    for part in visit.parts:
        if part is Part.UNLOADED:
            found.append(unloaded.key(visit.system))
        elif part is Part.INTERFERENCE:
            found += interference.keys(visit.system, sizes)
        else:
            found += [goodput.key(visit.system, visit.order, visit.seed, rate) for rate in rates]
    return found


def _num_points(wanted: Wanted) -> int:
    """Their rates may be unknown yet, not how many there are."""
    rates = wanted.rates or tuple(map(float, range(wanted.sizes.num_rates)))
    num_phases = len(phase_rates.CONDITIONS) if Part.GOODPUT in wanted.parts else 0
    return num_phases + sum(len(_points(visit, wanted.sizes, rates)) for visit in _visits(wanted))


def _outlook(results: Results, wanted: Wanted, rates: tuple[float, ...]) -> str:
    seconds = sum(
        wanted.sizes.num_requests / rate + _TAIL_S
        for visit in _visits(wanted)
        for rate in rates
        if goodput.key(visit.system, visit.order, visit.seed, rate) not in results
    )
    told = ", ".join(f"{rate:g}" for rate in rates)
    return f"the trace at {told} requests/s: about {seconds / 60:.0f} minutes for what is missing of it"


async def _measure(
    results: Results,
    visit: Visit,
    open_client: Open,
    wanted: Wanted,
    load: TraceLoad,
    progress: Shown,
    rates: tuple[float, ...],
) -> None:
    await _warm_up(open_client, wanted.sizes, progress)
    for part in visit.parts:
        if part is Part.UNLOADED:
            await unloaded.measure(results, visit.system, open_client, wanted.sizes, progress)
        elif part is Part.INTERFERENCE:
            await interference.measure(results, visit.system, open_client, wanted, progress)
        else:
            await goodput.measure(
                results, visit.system, visit.order, open_client, visit.seed, rates, load, progress
            )


async def _warm_up(open_client: Open, sizes: Sizes, progress: Shown) -> None:
    point = progress.begin("warming up", sizes.num_warm)
    async with open_client() as client:
        prompts = TokenPrompts((await client.served()).vocab_size or DEFAULT_VOCAB_SIZE, seed=10)
        for number in range(sizes.num_warm):
            prompt = prompts.make(_WARM_TOKENS, number)
            request = PlannedRequest(0.0, prompt, _WARM_ANSWER, _WARM_TOKENS)
            await run(Workload("warm", (request,)), client, point)
