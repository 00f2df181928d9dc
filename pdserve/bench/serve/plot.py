"""Latency over time and attainment over rate, as a PNG, SVG or PDF (by the file's ending)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pdserve.bench.errors import BenchError
from pdserve.bench.serve.goodput import Slo
from pdserve.bench.serve.load_test import Report, RunResult
from pdserve.bench.serve.records import RequestRecord
from pdserve.bench.serve.sweep import Crossing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ENDINGS = (".png", ".svg", ".pdf")
_NUM_WINDOWS = 40
_COLORS = (
    *("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:olive"),
    *("tab:cyan", "tab:gray"),
)


def check_ending(path: Path) -> None:
    """Raises BenchError."""
    if path.suffix.lower() not in ENDINGS:
        raise BenchError(f"{path}: a plot's file ends in {', '.join(ENDINGS)}")


def check_can_plot(path: Path) -> None:
    """Before anything is measured. Raises BenchError."""
    check_ending(path)
    if not path.absolute().parent.is_dir():
        raise BenchError(f"{path}: there is no such folder")
    if find_spec("matplotlib") is None:
        raise BenchError("a plot wants matplotlib: pip install 'pdserve[plot]'")


def plot_report(report: Report, path: Path) -> None:
    """A run's latencies; of a search those of the highest rate that met the target (if none, of the lowest),
    and its attainment beside them.
    """
    from matplotlib.figure import Figure

    num_columns = 2 if report.crossing is None else 3
    figure = Figure(figsize=(5.2 * num_columns, 3.8), layout="constrained")
    axes = figure.subplots(1, num_columns)
    shown = report.runs[0] if report.crossing is None else _best_run(report.runs, report.crossing.target)
    plot_ttft(axes[0], shown.records, report.slo)
    plot_itl(axes[1], shown.records)
    if report.crossing is not None:
        plot_attainment(axes[2], {report.served.model: report.crossing}, str(report.slo))
    figure.suptitle(f"{report.served.model}, {shown.workload.name} at {shown.workload.rate:.3g} requests/s")
    figure.savefig(path, dpi=120)


def _best_run(runs: Sequence[RunResult], target: float) -> RunResult:
    ordered = sorted(runs, key=lambda run: run.workload.rate)
    met = [run for run in ordered if run.goodput is not None and run.goodput.attainment >= target]
    return met[-1] if met else ordered[0]


def plot_ttft(axes: Axes, records: Sequence[RequestRecord], slo: Slo | None) -> None:
    """One dot a request, at its scheduled time."""
    done = [(record.scheduled_s, record.ttft_s) for record in records if record.is_ok]
    points = [(at_s, ttft_s * 1e3) for at_s, ttft_s in done if ttft_s is not None]
    axes.scatter([at_s for at_s, _ in points], [ms for _, ms in points], s=9, label="TTFT")
    failed = [record.scheduled_s for record in records if not record.is_ok]
    if failed:
        axes.scatter(failed, [0.0] * len(failed), s=16, marker="x", color="tab:red", label="failed")
    if slo is not None and slo.ttft_ms is not None:
        axes.axhline(slo.ttft_ms, color="gray", linestyle="--", linewidth=1, label="objective")
    axes.set(xlabel="scheduled at, s", ylabel="TTFT, ms", ylim=(0, None))
    axes.legend(fontsize="small")


def plot_itl(axes: Axes, records: Sequence[RequestRecord]) -> None:
    """Percentiles of the gaps that ended in each of some equal spans of time. A line is interrupted while no
    answer was being written; where all of them stood still, it goes on to the end of the stall.
    """
    done = [record for record in records if record.is_ok]
    ends = np.array([at_s for record in done for at_s in record.arrivals_s[1:]])
    gaps = np.array([gap for record in done for gap in record.gaps_s]) * 1e3
    axes.set(xlabel="at, s", ylabel="ITL, ms")
    if not len(gaps):
        return
    edges = np.linspace(0.0, float(ends.max()), _NUM_WINDOWS + 1)
    which = np.clip(np.digitize(ends, edges) - 1, 0, _NUM_WINDOWS - 1)
    spans = [
        index
        for index, (begin, end) in enumerate(pairwise(edges))
        if (which == index).any() or not _is_writing(done, begin, end)
    ]
    for percent, label in ((50, "p50"), (99, "p99"), (100, "largest")):
        of_span = [gaps[which == index] for index in spans]
        values = [float(np.percentile(each, percent)) if len(each) else math.nan for each in of_span]
        middles = [float(edges[index : index + 2].mean()) for index in spans]
        # The dots: a span between two idle ones has no line.
        axes.plot(middles, values, ".-", markersize=3, label=label)
    axes.set_yscale("log")
    # Plain numbers, not powers of ten; between decades only where there is room.
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}" if max(gaps) < 100 * max(min(gaps), 0.1) else "")
    axes.tick_params(axis="y", which="minor", labelsize="x-small")
    axes.legend(fontsize="small")


def _is_writing(records: Sequence[RequestRecord], begin_s: float, end_s: float) -> bool:
    """Whether an answer had begun and was not at its end, at any moment between."""
    return any(
        record.arrivals_s[0] < end_s and record.arrivals_s[-1] > begin_s
        for record in records
        if record.arrivals_s
    )


def plot_attainment(axes: Axes, curves: Mapping[str, Crossing], title: str) -> None:
    """One line for each of what is compared, with a mark where it falls through the target."""
    for index, (name, found) in enumerate(curves.items()):
        color = _COLORS[index % len(_COLORS)]
        style = "o-" if index < len(_COLORS) else "o--"
        rates = [point.rate for point in found.points]
        axes.plot(
            rates,
            [100 * point.attainment for point in found.points],
            style,
            markersize=3,
            color=color,
            label=name,
        )
        if found.rate is not None:
            axes.plot([found.rate], [100 * found.target], "v", color=color)
            axes.annotate(f"{found.rate:.2f}", (found.rate, 100 * found.target), fontsize="small", ha="left")
    for target in {found.target for found in curves.values()}:
        axes.axhline(100 * target, color="gray", linestyle="--", linewidth=1)
    axes.set(xlabel="requests/s", ylabel="requests within the objectives, %", ylim=(-2, 102), title=title)
    axes.legend(fontsize="small")
