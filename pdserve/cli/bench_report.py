"""What `pdserve bench engine` has measured, as JSON and as tables."""

from __future__ import annotations

import platform
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from pdserve.cli.console import out

if TYPE_CHECKING:
    from pdserve.bench.engine import Report
    from pdserve.bench.measure import RowResult

# A process that sleeps costs nothing; one that polls shows at once.
_SPINS_FROM = 0.05
BUSY_FROM = 0.5


def as_object(report: Report) -> dict[str, object]:
    rows = [
        {
            "name": each.row.name,
            "tok_s": round(each.tok_s, 2),
            "limit_share": _rounded(each.limit_share),
            "vllm_tok_s": _rounded(each.vllm_tok_s, 2),
            "ratio": _rounded(each.ratio),
        }
        for each in report.rows
    ]
    machine = {
        "cpu": cpu_name(),
        "cores": report.cores,
        "load_before": round(report.load_before, 2),
        "matrix_gflop_s": round(report.rates.operations / 1e9, 1),
        "memory_gb_s": round(report.rates.num_bytes / 1e9, 2),
    }
    settings = {
        "dtype": report.dtype,
        "compiled": report.is_compiled,
        "max_num_batched_tokens": report.max_num_batched_tokens,
    }
    vllm = asdict(report.vllm) if report.vllm is not None else None
    speculation = [asdict(each) for each in report.speculation]
    return {
        "rows": rows,
        "speculation": speculation,
        "machine": machine,
        "settings": settings,
        "vllm": vllm,
    }


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)


def show(report: Report) -> None:
    out.print(_table(report))
    rates = report.rates
    plural = "s" if len(report.cores) > 1 else ""
    out.print(
        f"{cpu_name()}, {len(report.cores)} thread{plural}: {report.dtype} products at "
        f"{rates.operations / 1e9:.0f} GFLOP/s, memory read at {rates.num_bytes / 1e9:.1f} GB/s"
    )
    kernels = "our own" if report.is_compiled else "torch's"
    out.print(f"kernels: {kernels}; prompt tokens in a step: {report.max_num_batched_tokens}", end="")
    if report.vllm is not None:
        out.print(f", in vLLM {report.vllm.version} {report.vllm.max_num_batched_tokens}", end="")
        if report.vllm.idle_load > _SPINS_FROM:
            out.print(
                f"\n[yellow]vLLM kept {report.vllm.idle_load:.0%} of a core busy while ours ran[/]", end=""
            )
    out.print()
    if report.load_before > BUSY_FROM:
        out.print(f"[yellow]the machine was busy: a load of {report.load_before:.1f} before this began[/]")
    if report.speculation:
        out.print(_speculation_table(report))


def _speculation_table(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    table.add_column("answer", no_wrap=True)
    for column in ("tok/s", "with speculation", "ratio", "drafts", "right"):
        table.add_column(column, justify="right", no_wrap=True)
    for each in report.speculation:
        table.add_row(
            each.name,
            f"{each.plain_tok_s:.1f}",
            f"{each.speculative_tok_s:.1f}",
            f"{each.ratio:.2f}",
            str(each.num_drafts),
            str(each.num_accepted_drafts),
        )
    return table


def _table(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    table.add_column("row", no_wrap=True)
    headings = ("tok/s", "of the limit", "bound by")
    for column in headings if report.vllm is None else (*headings, "vLLM tok/s", "ratio"):
        table.add_column(column, justify="right", no_wrap=True)
    for each in report.rows:
        cells = [each.row.name, f"{each.tok_s:.1f}", _share(each), _bound(each)]
        if each.vllm_tok_s is not None:
            cells += [f"{each.vllm_tok_s:.1f}", f"{each.ratio:.2f}"]
        table.add_row(*cells)
    return table


def _share(result: RowResult) -> str:
    return "" if result.limit_share is None else f"{result.limit_share:.0%}"


def _bound(result: RowResult) -> str:
    if result.is_memory_bound is None:
        return ""
    return "memory" if result.is_memory_bound else "arithmetic"


def cpu_name() -> str:
    """As Linux gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
