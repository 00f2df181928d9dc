"""What `pdserve bench transfer` has measured, as JSON and as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from pdserve.cli.bench_report import BUSY_FROM, cpu_name
from pdserve.cli.console import out

if TYPE_CHECKING:
    from pdserve.bench.transfer import Report


def as_object(report: Report) -> dict[str, object]:
    rows = [
        {
            "transport": each.transport,
            "tokens": each.num_tokens,
            "gb_s": round(each.bytes_s / 1e9, 3),
            "bare_gb_s": round(each.bare_bytes_s / 1e9, 3),
            "share": round(each.share, 3),
        }
        for each in report.raw
    ]
    handover = [
        {
            "transport": each.transport,
            "tokens": each.num_tokens,
            "p50_ms": round(each.ready_p50_ms, 3),
            "p99_ms": round(each.ready_p99_ms, 3),
            "hidden_share": round(each.hidden_share, 4),
        }
        for each in report.handovers
    ]
    first_step = [
        {
            "transport": each.transport,
            "tokens": each.num_tokens,
            "p50_ms": round(each.start_p50_ms, 3),
            "p99_ms": round(each.start_p99_ms, 3),
        }
        for each in report.handovers
    ]
    shipped = [
        {
            "transport": each.transport,
            "tokens": each.num_tokens,
            "requests": each.num_requests,
            "bytes_shipped": each.bytes_shipped,
            "bytes_computed": each.bytes_computed,
        }
        for each in report.handovers
    ]
    return {
        "rows": rows,
        "handover": handover,
        "first_step": first_step,
        "shipped": shipped,
        "machine": {"cpu": cpu_name(), "load_before": round(report.load_before, 2)},
        "settings": {
            "kv_bytes_per_token": report.token_bytes,
            "max_num_batched_tokens": report.max_num_batched_tokens,
        },
    }


def show(report: Report) -> None:
    out.print("[bold]From one process to another[/], beside the same bytes by the bare medium")
    out.print(_raw_table(report))
    if report.handovers:
        out.print("\n[bold]Hand-over of real requests[/], from the first token on the prefill worker")
        out.print(_handover_table(report))
    out.print(f"\n{cpu_name()}; {report.token_bytes} bytes of KV a token; ", end="")
    out.print(f"prompt tokens in a step: {report.max_num_batched_tokens}")
    if report.load_before > BUSY_FROM:
        out.print(f"[yellow]the machine was busy: a load of {report.load_before:.1f} before this began[/]")


def _raw_table(report: Report) -> Table:
    table = _table("tokens", "GB/s", "bare", "share")
    for each in report.raw:
        rates = (f"{rate / 1e9:.2f}" for rate in (each.bytes_s, each.bare_bytes_s))
        table.add_row(each.transport, str(each.num_tokens), *rates, f"{each.share:.0%}")
    return table


def _handover_table(report: Report) -> Table:
    table = _table("tokens", "KV there, p50", "p99 ms", "first step, p50", "p99 ms", "hidden", "shipped", "n")
    for each in report.handovers:
        times = (each.ready_p50_ms, each.ready_p99_ms, each.start_p50_ms, each.start_p99_ms)
        shares = (each.hidden_share, each.bytes_shipped / each.bytes_computed)
        table.add_row(
            each.transport,
            str(each.num_tokens),
            *(f"{time:.1f}" for time in times),
            *(f"{share:.1%}" for share in shares),
            str(each.num_requests),
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    table.add_column("transport", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table
