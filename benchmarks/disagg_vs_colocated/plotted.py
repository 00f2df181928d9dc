"""The results as one picture: the largest gaps while long prompts arrive, and attainment over rate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.disagg_vs_colocated import goodput, interference, phase_rates
from benchmarks.disagg_vs_colocated.comparing import pairs
from benchmarks.disagg_vs_colocated.report import TITLES, ideals, title
from benchmarks.disagg_vs_colocated.results import Results
from benchmarks.disagg_vs_colocated.settings import SLOS, Wanted
from benchmarks.disagg_vs_colocated.trace_load import TraceLoad
from pdserve.bench.serve.plot import plot_attainment
from pdserve.bench.serve.sweep import Crossing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WINDOW_S = 0.5
_IDEAL = "ideal"


def plot(results: Results, wanted: Wanted, load: TraceLoad, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    axes = figure.subplots(2, 2)
    _plot_gaps(axes[0][0], results, wanted)
    if phase_rates.phase_times(results, phase_rates.ALONE) is not None:
        for each, curves, slo in zip(axes.flat[1:], _curves(results, wanted, load), SLOS, strict=True):
            _plot_curves(each, curves, str(slo))
        handles, labels = axes[1][1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small")
    figure.savefig(path, dpi=110)


def _plot_curves(axes: Axes, curves: dict[str, Crossing], title: str) -> None:
    """One legend for all three is the figure's."""
    plot_attainment(axes, curves, title)
    axes.get_legend().remove()
    for line in axes.get_lines():
        if str(line.get_label()).startswith(_IDEAL):
            line.set_linestyle("--")
    points = [point.attainment for found in curves.values() for point in found.points]
    axes.set_ylim(100 * min(points, default=0.0) - 5, 102)


def _plot_gaps(axes: Axes, results: Results, wanted: Wanted) -> None:
    """Of each system's first segment: the largest gap that any stream had, in each half second."""
    whos = [(system.value, TITLES[system]) for system in wanted.systems]
    for who, name in (*whos, (interference.CONTROL, "control")):
        segments = interference.segments(results, who, wanted.sizes)
        if not segments:
            continue
        first = segments[0]
        ends = np.array([at_s for each in first.streams for at_s in each.arrivals_s[1:]])
        gaps = np.array([gap for each in first.streams for gap in each.gaps_s]) * 1e3
        begin_s = first.loaded_s[0]
        which = np.floor((ends - begin_s) / _WINDOW_S).astype(int)
        spans = sorted({int(each) for each in which})
        style = "--" if who == interference.CONTROL else "-"
        axes.plot(
            [index * _WINDOW_S for index in spans],
            [float(gaps[which == index].max()) for index in spans],
            style,
            linewidth=1,
            label=name,
        )
    axes.axvline(0.0, color="gray", linestyle=":", linewidth=1)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(
        xlabel="s since long prompts arrive",
        ylabel="ms",
        title="largest gap between two tokens of a stream",
    )
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")


def _curves(results: Results, wanted: Wanted, load: TraceLoad) -> list[dict[str, Crossing]]:
    """For each objective, by name."""
    rates = goodput.chosen_rates(results, wanted, load)
    curves: list[dict[str, Crossing]] = [{} for _ in SLOS]
    for pair in pairs(wanted):
        for index, slo in enumerate(SLOS):
            found = goodput.found(results, *pair, wanted, rates, slo)
            if found is not None:
                curves[index][title(*pair)] = found
    for condition, order, of_slos in ideals(results, wanted, load, rates):
        if condition == phase_rates.BESIDE:
            for index, each in enumerate(of_slos):
                curves[index][f"{_IDEAL}, {order.value}"] = each
    return curves
