"""The conversation trace at some rates on every system, and on the ideal: which share of its requests meets
all objectives, and at what rate that falls through the target.
"""

from __future__ import annotations

from typing import cast

from benchmarks.disagg_vs_colocated import phase_rates
from benchmarks.disagg_vs_colocated.ideal import simulate
from benchmarks.disagg_vs_colocated.phases import PhaseTimes
from benchmarks.disagg_vs_colocated.results import Results, as_rows, from_rows
from benchmarks.disagg_vs_colocated.settings import AGING_S, MAX_NUM_SEQS, SLOS, TARGET, Sizes, System, Wanted
from benchmarks.disagg_vs_colocated.shown import Shown
from benchmarks.disagg_vs_colocated.systems import Open
from benchmarks.disagg_vs_colocated.trace_load import TraceLoad
from pdserve.bench.serve.goodput import Slo, goodput
from pdserve.bench.serve.prompts import DEFAULT_VOCAB_SIZE
from pdserve.bench.serve.records import RequestRecord
from pdserve.bench.serve.run import run
from pdserve.bench.serve.sweep import Crossing, Point, crossing
from router.config import QueueOrder
from router.queue_order import QueuePolicy

_RATES_KEY = "goodput/rates"
_VOCAB_SIZE = 16  # the ideal reads no tokens


def key(system: System, order: QueueOrder, seed: int, rate: float) -> str:
    return f"goodput/{system.value}-{order.value}/{seed}/{rate:g}"


def keys(system: System, order: QueueOrder, wanted: Wanted, rates: tuple[float, ...]) -> list[str]:
    return [key(system, order, seed, rate) for seed in wanted.seeds for rate in rates]


def chosen_rates(results: Results, wanted: Wanted, load: TraceLoad) -> tuple[float, ...]:
    """As told; else such that one core's prefill would be busy for some shares of the time. Kept in the file:
    one point more at another time is comparable.
    """
    if wanted.rates is not None:
        return wanted.rates
    if _RATES_KEY not in results:
        results.put(_RATES_KEY, _rates_by_prefill(results, wanted.sizes, load))
    return tuple(cast("list[float]", results.get(_RATES_KEY)))


def _rates_by_prefill(results: Results, sizes: Sizes, load: TraceLoad) -> list[float]:
    times = phase_rates.phase_times(results, phase_rates.ALONE)
    if times is None:
        raise ValueError("the phases come first")
    a_second = len(load.lengths) / sum(times.prefill_s(length) for length in load.lengths)
    return [float(f"{share * a_second:.2g}") for share in sizes.rate_shares]


async def measure(
    results: Results,
    system: System,
    order: QueueOrder,
    open_client: Open,
    wanted: Wanted,
    load: TraceLoad,
    shown: Shown,
) -> None:
    """Every point that the file lacks."""
    async with open_client() as client:
        vocab_size = (await client.served()).vocab_size or DEFAULT_VOCAB_SIZE
        for seed in wanted.seeds:
            for rate in chosen_rates(results, wanted, load):
                name = key(system, order, seed, rate)
                if name in results:
                    shown.skip()
                    continue
                workload = load.at(rate, vocab_size, seed=1000 * seed + round(100 * rate))
                records = await run(workload, client, shown.begin(name, len(workload.requests)))
                results.put(name, as_rows(records))
                shown.done(f"{name}: {_told(records)}")


def _told(records: list[RequestRecord]) -> str:
    shares = ", ".join(f"{100 * goodput(records, slo).attainment:.0f} %" for slo in SLOS)
    num_failed = sum(not record.is_ok for record in records)
    return f"{shares} within the objectives" + (f", {num_failed} failed" if num_failed else "")


def measured(
    results: Results, system: System, order: QueueOrder, wanted: Wanted, rate: float
) -> list[RequestRecord]:
    """Of all seeds together."""
    names = [key(system, order, seed, rate) for seed in wanted.seeds]
    return [record for name in names if name in results for record in from_rows(results.get(name))]


def found(
    results: Results, system: System, order: QueueOrder, wanted: Wanted, rates: tuple[float, ...], slo: Slo
) -> Crossing | None:
    """None: nothing was measured."""
    by_rate = [(rate, measured(results, system, order, wanted, rate)) for rate in rates]
    points = [Point(rate, goodput(records, slo).attainment) for rate, records in by_rate if records]
    return crossing(points, TARGET) if points else None


def ideal(
    times: PhaseTimes, order: QueueOrder, load: TraceLoad, rates: tuple[float, ...], slo: Slo
) -> Crossing:
    """At the same rates, and interpolated between them as what was measured is."""
    policy = QueuePolicy(order, AGING_S)
    points = []
    for rate in rates:
        requests = load.at(rate, _VOCAB_SIZE, seed=0).requests
        records = simulate(requests, times, policy, MAX_NUM_SEQS)
        points.append(Point(rate, goodput(records, slo).attainment))
    return crossing(points, TARGET)
