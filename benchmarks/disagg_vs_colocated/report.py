"""The results as tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from benchmarks.disagg_vs_colocated import goodput, interference, machine, phase_rates, unloaded
from benchmarks.disagg_vs_colocated.comparing import pairs
from benchmarks.disagg_vs_colocated.results import Results
from benchmarks.disagg_vs_colocated.settings import SLOS, TARGET, Ordering, Part, System, Wanted
from benchmarks.disagg_vs_colocated.stream_figures import (
    StreamFigures,
    loaded_figures,
    long_ttfts_ms,
    quiet_figures,
)
from benchmarks.disagg_vs_colocated.trace_load import TraceLoad
from pdserve.bench.serve.sweep import Crossing

TITLES = {
    System.DISAGGREGATED: "1P1D",
    System.SHARING: "1P1D, P on both cores",
    System.COLOCATED: "two colocated",
    System.VLLM: "two vLLM",
}
_NONE = "-"


def lines(results: Results, wanted: Wanted, load: TraceLoad) -> Iterator[str]:
    yield from machine.lines(results)
    if Part.UNLOADED in wanted.parts:
        yield from _unloaded(results, wanted)
    if Part.INTERFERENCE in wanted.parts:
        yield from _interference(results, wanted)
    if Part.GOODPUT in wanted.parts:
        yield from _goodput(results, wanted, load)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for cells in (head, ["---"] * len(head), *rows):
        yield "| " + " | ".join(cells) + " |"
    yield ""


def title(system: System, order: Ordering) -> str:
    """vLLM has an order of its own."""
    return TITLES[system] if system is System.VLLM else f"{TITLES[system]}, {order.value}"


def _unloaded(results: Results, wanted: Wanted) -> Iterator[str]:
    lengths = wanted.sizes.unloaded_tokens
    rows = []
    for system in wanted.systems:
        if records := unloaded.records(results, system):
            ttfts = [
                median(long_ttfts_ms(each for each in records if each.num_prompt_tokens == length))
                for length in lengths
            ]
            itls = [
                median(
                    1e3 * gap for each in records if each.num_prompt_tokens == length for gap in each.gaps_s
                )
                for length in lengths
            ]
            rows.append((TITLES[system], _slashed(ttfts, "{:.0f}"), _slashed(itls, "{:.1f}")))
    tokens = " / ".join(map(str, lengths))
    yield f"Unloaded, prompts of {tokens} tokens:"
    yield ""
    yield from table(("", "TTFT p50, ms", "ITL p50, ms"), rows)


def _slashed(values: Iterable[float], form: str) -> str:
    return " / ".join(form.format(value) for value in values)


def _interference(results: Results, wanted: Wanted) -> Iterator[str]:
    sizes = wanted.sizes
    every_s = results.get(interference.EVERY_KEY)
    yield (
        f"{sizes.num_streams} streams of {sizes.stream_tokens[0]} tokens in, {sizes.stream_tokens[1]} out,"
        f" while a prompt of {sizes.long_tokens[0]} comes every {every_s or sizes.long_every_s:g} s:"
    )
    yield ""
    head = (
        "quiet → loaded",
        "streams' ITL p50, ms",
        "p99, ms",
        "largest gap, ms",
        "time in gaps > 100 ms",
        "tok/s",
        "of the control",
        "streams' next TTFT p50, ms",
        "long prompts' TTFT p50 alone → loaded, ms",
    )
    control = loaded_figures(interference.segments(results, interference.CONTROL, sizes), sizes.num_streams)
    rows = [_stream_row(results, wanted, system, control) for system in wanted.systems]
    rows.append(_control_row(results, wanted))
    yield from table(head, [row for row in rows if row is not None])


def _stream_row(
    results: Results, wanted: Wanted, system: System, control: StreamFigures | None
) -> Sequence[str] | None:
    segments = interference.segments(results, system.value, wanted.sizes)
    quiet = quiet_figures(segments, wanted.sizes.num_streams)
    loaded = loaded_figures(segments, wanted.sizes.num_streams)
    if quiet is None or loaded is None:
        return None
    alone = long_ttfts_ms(interference.alone(results, system))
    longs = long_ttfts_ms(record for segment in segments for record in segment.longs)
    long_cell = _NONE
    if alone and longs:
        ratio = median(longs) / median(alone)
        long_cell = f"{median(alone):.0f} → {median(longs):.0f} ({ratio:.2f})"
    share = _NONE if control is None else f"{100 * loaded.tok_s / control.tok_s:.0f} %"
    return (TITLES[system], *_stream_cells(quiet, loaded, share), long_cell)


def _control_row(results: Results, wanted: Wanted) -> Sequence[str] | None:
    segments = interference.segments(results, interference.CONTROL, wanted.sizes)
    quiet = quiet_figures(segments, wanted.sizes.num_streams)
    loaded = loaded_figures(segments, wanted.sizes.num_streams)
    if quiet is None or loaded is None:
        return None
    took_s = [seconds for segment in segments for seconds in segment.prefills_s]
    long_cell = f"its own prefill: {1e3 * median(took_s):.0f}" if took_s else _NONE
    return ("control: 1P1D beside a process that prefills", *_stream_cells(quiet, loaded, "100 %"), long_cell)


def _stream_cells(quiet: StreamFigures, loaded: StreamFigures, share: str) -> Iterator[str]:
    yield f"{quiet.p50_ms:.1f} → {loaded.p50_ms:.1f}"
    yield f"{quiet.p99_ms:.1f} → {loaded.p99_ms:.1f} ({loaded.p99_ms / quiet.p99_ms:.2f})"
    yield f"{quiet.longest_ms:.0f} → {loaded.longest_ms:.0f}"
    yield f"{100 * quiet.stalled_share:.1f} → {100 * loaded.stalled_share:.1f} %"
    yield f"{quiet.tok_s:.0f} → {loaded.tok_s:.0f}"
    yield share
    yield " → ".join(
        _NONE if each.ttft_p50_ms is None else f"{each.ttft_p50_ms:.0f}" for each in (quiet, loaded)
    )


def _goodput(results: Results, wanted: Wanted, load: TraceLoad) -> Iterator[str]:
    if phase_rates.phase_times(results, phase_rates.ALONE) is None:
        return
    rates = goodput.chosen_rates(results, wanted, load)
    yield (
        f"Requests a second of {load.name} within the objectives for {100 * TARGET:.0f} %"
        f" ({wanted.sizes.num_requests} requests, {len(wanted.seeds)} runs at each of"
        f" {_slashed(rates, '{:g}')} a second):"
    )
    yield ""
    rows = [
        (title(*pair), *(_rate(goodput.found(results, *pair, wanted, rates, slo)) for slo in SLOS))
        for pair in pairs(wanted)
    ]
    for condition, order, found in ideals(results, wanted, load, rates):
        name = f"ideal 1P1D, {order.value}, phases measured {condition}"
        rows.append((name, *(_rate(each) for each in found)))
    yield from table(("", *map(str, SLOS)), rows)
    yield from _limits(results, load)
    yield from _shares(results, wanted, load, rates)


def _limits(results: Results, load: TraceLoad) -> Iterator[str]:
    """What no system with one core for a prompt can meet, at however low a rate."""
    times = phase_rates.phase_times(results, phase_rates.ALONE)
    for ttft_ms in sorted({slo.ttft_ms for slo in SLOS if slo.ttft_ms is not None} if times else ()):
        late = [length for length in load.lengths if times and 1e3 * times.prefill_s(length) > ttft_ms]
        share = 100 * len(late) / len(load.lengths)
        yield f"{share:.0f} % of the prompts take one core more than {ttft_ms:g} ms alone."
    yield ""


def ideals(
    results: Results, wanted: Wanted, load: TraceLoad, rates: tuple[float, ...]
) -> Iterator[tuple[str, Ordering, list[Crossing]]]:
    """With the phases alone, and with each while the other one runs; in each order; for each objective."""
    for condition in phase_rates.CONDITIONS:
        times = phase_rates.phase_times(results, condition)
        for order in wanted.orders if times is not None else ():
            if times is not None:
                yield condition, order, [goodput.ideal(times, order, load, rates, slo) for slo in SLOS]


def _rate(found: Crossing | None) -> str:
    if found is None:
        return _NONE
    if found.rate is not None:
        return f"{found.rate:.2f}"
    return f"> {found.points[-1].rate:g}" if found.is_above else f"< {found.points[0].rate:g}"


def _shares(results: Results, wanted: Wanted, load: TraceLoad, rates: tuple[float, ...]) -> Iterator[str]:
    """1P1D over the ideal of its order, over the better colocated one, and over vLLM."""
    yield "1P1D's goodput over that of the others:"
    yield ""
    rows = []
    for order in wanted.orders:
        ours = [goodput.found(results, System.DISAGGREGATED, order, wanted, rates, slo) for slo in SLOS]
        for condition, its_order, found in ideals(results, wanted, load, rates):
            if its_order is order:
                name = f"{order.value} / ideal, {condition}"
                rows.append((name, *(_ratio(a, b) for a, b in zip(ours, found, strict=True))))
        for other in pairs(wanted):
            if other[0] is not System.DISAGGREGATED:
                theirs = [goodput.found(results, *other, wanted, rates, slo) for slo in SLOS]
                cells = (_ratio(a, b) for a, b in zip(ours, theirs, strict=True))
                rows.append((f"{order.value} / {title(*other)}", *cells))
    yield from table(("", *map(str, SLOS)), rows)


def _ratio(ours: Crossing | None, theirs: Crossing | None) -> str:
    """Where one is known by a bound only: what that says of the ratio."""
    if ours is None or theirs is None:
        return _NONE
    if ours.rate is not None and theirs.rate is not None:
        return f"{ours.rate / theirs.rate:.2f}"
    if ours.rate is not None:
        bound = ours.rate / theirs.points[-1 if theirs.is_above else 0].rate
        return f"< {bound:.2f}" if theirs.is_above else f"> {bound:.2f}"
    if theirs.rate is not None:
        bound = ours.points[-1 if ours.is_above else 0].rate / theirs.rate
        return f"> {bound:.2f}" if ours.is_above else f"< {bound:.2f}"
    return _NONE
