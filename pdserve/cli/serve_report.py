"""What `pdserve bench serve` has measured, as JSON and as tables."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.table import Table

from pdserve.bench.serve.records import RequestRecord
from pdserve.bench.serve.stalls import stalls
from pdserve.bench.serve.sweep import Crossing
from pdserve.bench.serve.workload import Workload
from pdserve.cli.console import out

if TYPE_CHECKING:
    from pdserve.bench.serve.load_test import Report, RunResult
    from pdserve.bench.serve.summary import Spread, Summary

# A client that is as busy as this measures itself.
_BUSY_CLIENT = 0.8
# Requests that go out so late (p99) are not the load that was asked for.
_LATE_MS = 50.0
_LATENCIES = {
    "TTFT": "ttft_ms",
    "TPOT": "tpot_ms",
    "ITL": "itl_ms",
    "TBT": "tbt_ms",
    "E2EL": "e2el_ms",
    "send lag": "lag_ms",
}


def as_object(report: Report, with_requests: bool = False) -> dict[str, object]:
    return {
        "model": report.served.model,
        "prompt_seed": report.prompt_seed,
        "slo": None if report.slo is None else asdict(report.slo),
        "runs": [_run_object(each, with_requests) for each in report.runs],
        "goodput": None if report.crossing is None else asdict(report.crossing),
        "is_whole": report.is_whole,
    }


def _run_object(result: RunResult, with_requests: bool) -> dict[str, object]:
    summary = result.summary
    rates = {
        "request_throughput": summary.request_rate,
        "output_throughput": summary.token_rate,
        "total_token_throughput": summary.total_token_rate,
    }
    met = result.goodput
    made: dict[str, object] = {
        "workload": _workload_object(result.workload),
        **asdict(summary),
        **rates,
        "stalled_share": stalls(result.records).stalled_share,
        "attainment": None if met is None else met.attainment,
        "request_goodput": None if met is None else met.request_rate,
        "client_load": result.client_load,
    }
    if with_requests:
        made["requests"] = [_request_object(record) for record in result.records]
    return made


def _workload_object(workload: Workload) -> dict[str, object]:
    """JSON has no infinity: a rate of None is all at once."""
    scaling = workload.scaling
    return {
        "name": workload.name,
        "rate": _finite(workload.rate),
        "time_factor": workload.time_factor,
        "scaling": None if scaling is None else asdict(scaling) | {"trace_rate": _finite(scaling.trace_rate)},
    }


def _finite(rate: float) -> float | None:
    return rate if math.isfinite(rate) else None


def _request_object(record: RequestRecord) -> dict[str, object]:
    figures = {
        "ttft_s": record.ttft_s,
        "tpot_s": record.tpot_s,
        "tbt_s": record.tbt_s,
        "e2el_s": record.e2el_s,
    }
    return asdict(record) | figures


def show(report: Report) -> None:
    if not report.is_whole:
        out.print("[yellow]interrupted[/]: of what had ended by then")
    if report.crossing is None:
        _show_run(report.runs[-1])
    else:
        out.print(_sweep_table(report))
        out.print(_found(report.crossing, str(report.slo)))
    for result in report.runs:
        _warn(result)


def _show_run(result: RunResult) -> None:
    summary, workload = result.summary, result.workload
    out.print(f"{workload.name}: {_load(workload)}")
    out.print(_latencies(summary))
    cached = f" ({summary.num_cached_tokens:,} cached)" if summary.num_cached_tokens else ""
    out.print(
        f"{summary.num_ok} of {summary.num_requests} requests ended well in {summary.duration_s:.1f} s, "
        f"{summary.max_concurrency} at once at most\n"
        f"{summary.num_prompt_tokens:,} prompt tokens{cached}, {summary.num_tokens:,} generated\n"
        f"{summary.request_rate:.3g} requests/s, {summary.token_rate:.1f} tokens/s generated, "
        f"{summary.total_token_rate:.1f} with prompts"
    )
    still = stalls(result.records)
    if still.stream_s:
        told = (
            f"{still.stalled_share:.1%} of their time in gaps over 100 ms, the longest {still.longest_ms:.0f}"
        )
        out.print(f"streams spent {told} ms")
    if result.goodput is not None:
        met = result.goodput
        out.print(
            f"[bold]{met.attainment:.1%}[/] of all requests met the objectives: "
            f"goodput {met.request_rate:.3g} requests/s"
        )


def _load(workload: Workload) -> str:
    parts = [f"{len(workload.requests)} requests"]
    parts.append(f"{workload.rate:.3g}/s" if math.isfinite(workload.rate) else "all at once")
    scaling = workload.scaling
    if scaling is not None:
        if workload.time_factor is not None:
            parts.append(f"its time stretched by {workload.time_factor:.4g}")
        if scaling.block_tokens != scaling.trace_block_tokens:
            parts.append(f"blocks of {scaling.trace_block_tokens} tokens as {scaling.block_tokens}")
        if scaling.num_clipped_prompts or scaling.num_clipped_answers:
            parts.append(
                f"clipped: {scaling.num_clipped_prompts} prompts, {scaling.num_clipped_answers} answers"
            )
    return ", ".join(parts)


def _latencies(summary: Summary) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    table.add_column("ms", no_wrap=True)
    for column in ("mean", "p50", "p90", "p99", "max"):
        table.add_column(column, justify="right", no_wrap=True)
    for title, field in _LATENCIES.items():
        spread: Spread | None = getattr(summary, field)
        if spread is not None:
            table.add_row(title, *(f"{value:.1f}" for value in asdict(spread).values()))
    return table


def _sweep_table(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    for column in (
        "requests/s",
        "within",
        "TTFT p50",
        "p90",
        "TPOT p50",
        "p90",
        "TBT p90",
        "tokens/s",
        "failed",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for each in sorted(report.runs, key=lambda result: result.workload.rate):
        summary = each.summary
        table.add_row(
            f"{each.workload.rate:.3g}",
            "" if each.goodput is None else f"{each.goodput.attainment:.1%}",
            *_percentiles(summary.ttft_ms),
            *_percentiles(summary.tpot_ms),
            _percentiles(summary.tbt_ms)[1],
            f"{summary.token_rate:.1f}",
            str(summary.num_failed),
        )
    return table


def _percentiles(spread: Spread | None) -> tuple[str, str]:
    return ("", "") if spread is None else (f"{spread.p50:.0f}", f"{spread.p90:.0f}")


def _found(crossing: Crossing, slo: str) -> str:
    share = f"{crossing.target:.0%} of requests within {slo} ms"
    if crossing.rate is not None:
        return f"goodput, {share}: [bold]{crossing.rate:.3g}[/] requests/s"
    if crossing.is_above:
        return f"goodput, {share}: at least [bold]{crossing.points[-1].rate:.3g}[/] requests/s"
    return f"goodput, {share}: less than [bold]{crossing.points[0].rate:.3g}[/] requests/s"


def _warn(result: RunResult) -> None:
    summary = result.summary
    at = f"at {result.workload.rate:.3g} requests/s: "
    for failure in summary.failures:
        out.print(f"[red]{at}{failure.count} failed with {failure.code}[/]: ", end="")
        out.print(failure.example, markup=False)
    if summary.num_arrivals and summary.num_tokens > 1.05 * summary.num_arrivals:
        ratio = summary.num_tokens / summary.num_arrivals
        out.print(f"{at}{ratio:.1f} tokens came at once; ITL and TBT are between arrivals")
    if result.client_load > _BUSY_CLIENT:
        out.print(f"[yellow]{at}the client itself took {result.client_load:.0%} of a core[/]")
    if summary.lag_ms is not None and summary.lag_ms.p99 > _LATE_MS:
        out.print(f"[yellow]{at}requests were sent up to {summary.lag_ms.max:.0f} ms late[/]")
