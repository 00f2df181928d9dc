"""The conversation trace at some rates on every system, and on the ideal: which share of its requests meets
all objectives, and at what rate that falls through the target.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from benchmarks.disagg_vs_colocated import phase_rates
from benchmarks.disagg_vs_colocated.ideal import simulate
from benchmarks.disagg_vs_colocated.phases import PhaseTimes
from benchmarks.disagg_vs_colocated.results import Results, as_rows, from_rows
from benchmarks.disagg_vs_colocated.settings import (
    AGING_S,
    MAX_NUM_SEQS,
    SLOS,
    TARGET,
    Ordering,
    System,
    Wanted,
)
from benchmarks.disagg_vs_colocated.shown import Shown
from benchmarks.disagg_vs_colocated.systems import Open
from benchmarks.disagg_vs_colocated.trace_load import TraceLoad
from pdserve.bench.serve.goodput import Slo, goodput
from pdserve.bench.serve.prompts import DEFAULT_VOCAB_SIZE
from pdserve.bench.serve.records import RequestRecord
from pdserve.bench.serve.run import run
from pdserve.bench.serve.sweep import Crossing, Point, crossing
from router.queue_order import QueuePolicy

_RATES_KEY = "goodput/rates"
# Of the requests that one core can prefill in a second, one after the other.
_GRID = tuple(0.08 * step for step in range(1, 20))
_OF_CAPACITY = (0.2, 0.4, 0.6, 0.8, 1.0, 1.3)
_LEAST_TIGHT, _LEAST_LOOSE = 0.2, 0.45
# Of the ideal's goodput.
_OF_LOOSE = (0.4, 0.6, 0.8, 1.0, 1.25, 1.6)
_TWO_OF_TIGHT, _FOUR_OF_LOOSE = (0.8, 1.05), (0.6, 0.85, 1.1, 1.5)


def key(system: System, order: Ordering, seed: int, rate: float) -> str:
    return f"goodput/{system.value}-{order.value}/{seed}/{rate:g}"


def chosen_rates(results: Results, wanted: Wanted, load: TraceLoad) -> tuple[float, ...]:
    """As told; else around the ideal's goodput on this machine. Kept in the file: what is measured at another
    time is measured at the same.
    """
    if wanted.rates is not None:
        return wanted.rates
    if _RATES_KEY not in results:
        times = phase_rates.phase_times(results, phase_rates.BESIDE)
        if times is None:
            raise ValueError("the phases come first")
        rates = rates_around_ideal(times, load)
        results.put(_RATES_KEY, rates[:: len(rates) // wanted.sizes.num_rates])
    return tuple(cast("list[float]", results.get(_RATES_KEY)))


def rates_around_ideal(times: PhaseTimes, load: TraceLoad) -> list[float]:
    """Six: some below what the ideal carries within the first (the tightest) and the second objective, for
    those that carry less, and some above. A share of what one core can prefill is the least: a point at less
    takes half an hour and has hardly a queue.
    """
    a_second = len(load.lengths) / sum(times.prefill_s(length) for length in load.lengths)
    grid = tuple(share * a_second for share in _GRID)
    tight, loose = (ideal(times, Ordering.SHORTEST, load, grid, slo).rate for slo in SLOS[:2])
    if loose is None:
        rates = [share * a_second for share in _OF_CAPACITY]
    elif tight is None:
        rates = [share * max(loose, _LEAST_LOOSE * a_second) for share in _OF_LOOSE]
    else:
        tight, loose = max(tight, _LEAST_TIGHT * a_second), max(loose, _LEAST_LOOSE * a_second)
        rates = [*(share * tight for share in _TWO_OF_TIGHT), *(share * loose for share in _FOUR_OF_LOOSE)]
    return _apart(rates)


def _apart(rates: Iterable[float]) -> list[float]:
    """In two digits, rising by a tenth at least."""
    found: list[float] = []
    for rate in sorted(rates):
        found.append(float(f"{max(rate, 1.1 * found[-1]) if found else rate:.2g}"))
    return found


def prompt_seed(seed: int, rate: float) -> int:
    """Each point's own: prompts that come again are in caches."""
    return 1_000_000 * seed + round(10_000 * rate)


async def measure(
    results: Results,
    system: System,
    order: Ordering,
    open_client: Open,
    seed: int,
    rates: Sequence[float],
    load: TraceLoad,
    shown: Shown,
) -> None:
    """Every point of one seed that the file lacks."""
    async with open_client() as client:
        vocab_size = (await client.served()).vocab_size or DEFAULT_VOCAB_SIZE
        for rate in rates:
            name = key(system, order, seed, rate)
            if name in results:
                shown.skip()
                continue
            workload = load.at(rate, vocab_size, prompt_seed(seed, rate))
            records = await run(workload, client, shown.begin(name, len(workload.requests)))
            results.put(name, as_rows(records))
            shown.done(f"{name}: {_told(records)}")


def _told(records: list[RequestRecord]) -> str:
    shares = ", ".join(f"{100 * goodput(records, slo).attainment:.0f} %" for slo in SLOS)
    num_failed = sum(not record.is_ok for record in records)
    return f"{shares} within the objectives" + (f", {num_failed} failed" if num_failed else "")


def measured(
    results: Results, system: System, order: Ordering, wanted: Wanted, rate: float
) -> list[RequestRecord]:
    """Of all seeds together."""
    names = [key(system, order, seed, rate) for seed in wanted.seeds]
    return [record for name in names if name in results for record in from_rows(results.get(name))]


def found(
    results: Results, system: System, order: Ordering, wanted: Wanted, rates: tuple[float, ...], slo: Slo
) -> Crossing | None:
    """None: nothing was measured."""
    by_rate = [(rate, measured(results, system, order, wanted, rate)) for rate in rates]
    points = [Point(rate, goodput(records, slo).attainment) for rate, records in by_rate if records]
    return crossing(points, TARGET) if points else None


def ideal(
    times: PhaseTimes, order: Ordering, load: TraceLoad, rates: tuple[float, ...], slo: Slo
) -> Crossing:
    """At the same rates, and interpolated between them as what was measured is."""
    policy = QueuePolicy(order.queue, AGING_S)
    points = []
    for rate in rates:
        records = simulate(load.outlined(rate), times, policy, MAX_NUM_SEQS, order.turn_tokens)
        points.append(Point(rate, goodput(records, slo).attainment))
    return crossing(points, TARGET)
