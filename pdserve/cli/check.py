"""`pdserve check FILE`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from cluster.config_file import ConfigError, load_config
from pdserve.cli.console import out, write
from pdserve.cli.up import File

if TYPE_CHECKING:
    from cluster.check import Report

AsJson = Annotated[bool, typer.Option("--json", metavar="", help="One JSON object, for programs.")]
_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


def check(file: File, as_json: AsJson = False) -> None:
    """Say whether a configuration would work here, and how much memory it would take. Starts nothing.

    Exit code 1 where it would not.

    Examples:
        pdserve check cluster_configs/local-cpu.yaml
        pdserve check cluster_configs/multi-node.yaml --json
    """
    try:
        config = load_config(file)
    except ConfigError as error:
        if not as_json:
            raise
        findings = [{"severity": "error", "message": problem} for problem in error.problems]
        write(json.dumps({"ok": False, "findings": findings}) + "\n")
        raise typer.Exit(1) from None
    from cluster.check import check as run  # torch comes with it

    report = run(config)
    if as_json:
        write(json.dumps(as_object(report)) + "\n")
    else:
        _show(report)
    if not report.is_ok:
        raise typer.Exit(1)


def as_object(report: Report) -> dict[str, object]:
    workers = [
        {
            "pool": each.role.value,
            "num_workers": num_workers,
            "device": each.device,
            "dtype": each.dtype,
            "weights_bytes": each.weights_bytes,
            "kv_bytes": each.kv_bytes,
            "working_bytes": each.working_bytes,
            "process_bytes": each.process_bytes,
        }
        for num_workers, each in report.workers
    ]
    findings = [{"severity": each.severity.value, "message": each.message} for each in report.findings]
    return {
        "ok": report.is_ok,
        "name": report.name,
        "nodes_of": report.nodes_of,
        "model": asdict(report.facts) if report.facts is not None else None,
        "workers": workers,
        "nodes": [asdict(node) for node in report.memory],
        "findings": findings,
    }


def _show(report: Report) -> None:
    facts = report.facts
    model = f"  {facts.kind}, {facts.num_weights / 1e6:.0f} M weights" if facts is not None else ""
    out.print(f"[bold]{report.name}[/]{model}, against {report.nodes_of}")
    if report.workers:
        out.print(_memory_table(report))
    for node in report.memory:
        out.print(
            f"{node.address}: {node.num_workers} workers and what serves them need "
            f"{_gib(node.needed_bytes)} of {_gib(node.memory_bytes)}"
        )
    for finding in report.findings:
        severity = finding.severity.value
        out.print(f"[{_STYLES[severity]}]{severity}:[/]", end=" ")
        out.print(finding.message, markup=False)
    out.print(f"[green]{report.name} would work[/]" if report.is_ok else f"{report.name} would not work")


def _memory_table(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    for column in ("pool", "workers", "device"):
        table.add_column(column, no_wrap=True)
    for column in ("weights", "KV pool", "working", "process", "each"):
        table.add_column(column, justify="right", no_wrap=True)
    for num_workers, each in report.workers:
        parts = (each.weights_bytes, each.kv_bytes, each.working_bytes, each.process_bytes)
        row = (each.role.value, str(num_workers), f"{each.device} {each.dtype}")
        table.add_row(*row, *(_gib(part) for part in parts), _gib(sum(parts)))
    return table


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
