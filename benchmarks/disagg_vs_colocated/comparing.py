"""One system after the other: each is started once, if the file lacks anything of it."""

from __future__ import annotations

import asyncio

from benchmarks.disagg_vs_colocated import goodput, interference, phase_rates, unloaded
from benchmarks.disagg_vs_colocated.cores import leave
from benchmarks.disagg_vs_colocated.results import Results
from benchmarks.disagg_vs_colocated.settings import Part, Sizes, System, Wanted
from benchmarks.disagg_vs_colocated.shown import Shown, shown
from benchmarks.disagg_vs_colocated.systems import Open, running
from benchmarks.disagg_vs_colocated.trace_load import TraceLoad
from pdserve.bench.serve.prompts import DEFAULT_VOCAB_SIZE, TokenPrompts
from pdserve.bench.serve.run import run
from pdserve.bench.serve.workload import PlannedRequest, Workload
from router.config import QueueOrder

# Asked for before anything is timed: connections are made, and memory is touched for the first time.
_WARM_TOKENS, _WARM_ANSWER = 2048, 8


def compare(results: Results, wanted: Wanted, load: TraceLoad) -> None:
    """Measures what the file lacks. Raises BenchError."""
    with shown(_num_points(wanted)) as progress:
        rates: tuple[float, ...] = ()
        if Part.GOODPUT in wanted.parts:
            phase_rates.measure(results, wanted.sizes, wanted.cores, progress)
            rates = goodput.chosen_rates(results, wanted, load)
        for system, order in pairs(wanted):
            planned = _planned(system, order, wanted, rates)
            if all(key in results for key in planned):
                progress.skip(len(planned))
                continue
            with running(system, order, wanted.cores, wanted.vllm_python, progress.say) as open_client:
                leave(wanted.cores)
                asyncio.run(_measure(results, system, order, open_client, wanted, load, progress))


async def _measure(
    results: Results,
    system: System,
    order: QueueOrder,
    open_client: Open,
    wanted: Wanted,
    load: TraceLoad,
    progress: Shown,
) -> None:
    await _warm_up(open_client, wanted.sizes, progress)
    for part in _parts(system, order, wanted):
        if part is Part.UNLOADED:
            await unloaded.measure(results, system, open_client, wanted.sizes, progress)
        elif part is Part.INTERFERENCE:
            await interference.measure(results, system, open_client, wanted, progress)
        else:
            await goodput.measure(results, system, order, open_client, wanted, load, progress)


async def _warm_up(open_client: Open, sizes: Sizes, progress: Shown) -> None:
    point = progress.begin("warming up", sizes.num_warm)
    async with open_client() as client:
        prompts = TokenPrompts((await client.served()).vocab_size or DEFAULT_VOCAB_SIZE, seed=10)
        for number in range(sizes.num_warm):
            prompt = prompts.make(_WARM_TOKENS, number)
            request = PlannedRequest(0.0, prompt, _WARM_ANSWER, _WARM_TOKENS)
            await run(Workload("warm", (request,)), client, point)


def pairs(wanted: Wanted) -> list[tuple[System, QueueOrder]]:
    """vLLM has an order of its own, the first."""
    return [
        (system, order)
        for system in wanted.systems
        for order in (wanted.orders if system is not System.VLLM else (QueueOrder.FCFS,))
    ]


def _parts(system: System, order: QueueOrder, wanted: Wanted) -> list[Part]:
    """Only the trace makes a queue: the other parts are measured with the first of the orders."""
    is_first = system is System.VLLM or order is wanted.orders[0]
    return [part for part in wanted.parts if is_first or part is Part.GOODPUT]


def _planned(system: System, order: QueueOrder, wanted: Wanted, rates: tuple[float, ...]) -> list[str]:
    """The keys of its points."""
    found: list[str] = []
    for part in _parts(system, order, wanted):
        if part is Part.UNLOADED:
            found.append(unloaded.key(system))
        elif part is Part.INTERFERENCE:
            found += interference.keys(system, wanted.sizes)
        else:
            found += goodput.keys(system, order, wanted, rates)
    return found


def _num_points(wanted: Wanted) -> int:
    """Their rates may be unknown yet, not how many there are."""
    rates = wanted.rates or wanted.sizes.rate_shares
    num_phases = len(phase_rates.CONDITIONS) if Part.GOODPUT in wanted.parts else 0
    return num_phases + sum(len(_planned(*pair, wanted, rates)) for pair in pairs(wanted))
