"""`pdserve top`."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pdserve.cli.console import can_redraw, out
from pdserve.cli.rates import Rates, WorkerRates
from pdserve.cli.status import STYLES, in_mb, pool_lines, quarantine_lines, router_lines
from pdserve.cli.target import Choice, Target, asks_router
from pdserve.client import Cluster, PdserveError, Quantiles, Role, Worker, WorkerState

_TIMEOUT_S = 10.0
_BAR_WIDTH = 12
# In fewer columns a table leaves out what it can do without, so that no figure is cut off.
_ROOMY = 110
_GONE = (WorkerState.STOPPED, WorkerState.DEAD)
# Two snapshots make a rate.
_FIRST_PAUSE_S = 1.0


@asks_router
def top(
    choice: Choice,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.2, help="Between two looks.")
    ] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", metavar="", help="One picture, then end; so it is in a pipe.")
    ] = False,
) -> None:
    """Watch a cluster: what clients feel, what each worker does, and how KV goes over. Ctrl-C ends it.

    TTFT and ITL are those of the last ten seconds, at the router that is asked; rates are of the last five.

    Examples:
        pdserve top
        pdserve top --once
    """
    at = choice.target()
    if once or not can_redraw():
        out.print(asyncio.run(look_once(at)))
        return
    try:
        asyncio.run(_watch(at, interval))
    except KeyboardInterrupt:
        pass  # the only way to end it


async def look_once(target: Target) -> Group:
    """Raises PdserveError."""
    rates = Rates()
    async with target.client() as client:
        rates.add(await client.get_cluster(timeout=_TIMEOUT_S), time.monotonic())
        await asyncio.sleep(_FIRST_PAUSE_S)
        cluster = await client.get_cluster(timeout=_TIMEOUT_S)
    rates.add(cluster, time.monotonic())
    return screen(cluster, rates, None)


async def _watch(target: Target, interval: float) -> None:
    """A router that does not answer for a while is said to; one that never did is an error."""
    rates = Rates()
    async with target.client() as client:
        cluster, trouble = await client.get_cluster(timeout=_TIMEOUT_S), None
        rates.add(cluster, time.monotonic())
        with Live(screen(cluster, rates, None), console=out, screen=True, auto_refresh=False) as live:
            while True:
                live.update(screen(cluster, rates, trouble), refresh=True)
                await asyncio.sleep(interval)
                try:
                    cluster, trouble = await client.get_cluster(timeout=_TIMEOUT_S), None
                    rates.add(cluster, time.monotonic())
                except PdserveError as error:
                    trouble = str(error)


def screen(cluster: Cluster, rates: Rates, trouble: str | None) -> Group:
    """`trouble`: why the figures are old."""
    parts: list[Table | Text] = [_head(cluster), _felt(cluster)]
    if trouble is not None:
        parts.append(Text(f"no answer, these figures are old: {trouble}", style="red"))
    parts += [Text(), _workers(cluster, rates), Text()]
    parts += [Text(line, style="dim") for line in (*router_lines(cluster), *pool_lines(cluster))]
    parts += [Text(line, style="yellow") for line in quarantine_lines(cluster)]
    for pool in cluster.pools:
        if pool.unrecoverable_reason:
            parts.append(Text(f"{pool.role.value}: {pool.unrecoverable_reason}", style="red"))
    return Group(*parts)


def _head(cluster: Cluster) -> Text:
    http = f"  {cluster.http_url}" if cluster.http_url else ""
    clock = time.strftime("%H:%M:%S")
    return Text.assemble(
        (cluster.name, "bold"), f"  model {cluster.model}  gRPC {cluster.router_grpc}{http}  {clock}"
    )


def _felt(cluster: Cluster) -> Table:
    """What clients feel."""
    load = cluster.load
    table = Table(box=None, pad_edge=False, padding=(0, 3 if _is_roomy() else 1, 0, 0), header_style="dim")
    for column in ("running", "queued", "TTFT p50/p99 ms", "ITL p50/p99 ms", "tok/s", "prompt tok/s", "done"):
        table.add_column(column, no_wrap=True)
    table.add_row(
        str(load.num_running),
        str(load.num_waiting),
        _pair(load.ttft_ms),
        _pair(load.itl_ms),
        f"{load.output_tokens_per_s:.1f}",
        f"{load.prompt_tokens_per_s:.0f}",
        f"{load.num_finished} in {load.window_ms / 1000:.0f} s",
    )
    return table


def _pair(quantiles: Quantiles) -> str:
    return f"{quantiles.p50:.0f} / {quantiles.p99:.0f}" if quantiles.count else "-"


def _workers(cluster: Cluster, rates: Rates) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2 if _is_roomy() else 1, 0, 0), header_style="dim")
    for column in ("worker", "state"):
        table.add_column(column, no_wrap=True)
    for column in ("run", "wait"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("KV in use", no_wrap=True)
    for column in ("tok/s", "KV out/s", "KV in/s", "hand-over ms", "RSS"):
        table.add_column(column, justify="right", no_wrap=True)
    for pool in cluster.pools:
        for worker in pool.workers:
            table.add_row(*_row(worker, rates.of(worker)))
    return table


def _row(worker: Worker, rates: WorkerRates | None) -> list[str]:
    style = STYLES.get(worker.state.name, "dim")
    who = [worker.id, f"[{style}]{worker.state.name}[/]"]
    if worker.state in _GONE or worker.state is WorkerState.STARTING:
        return who
    load = worker.load
    figures = ["-"] * 4 if rates is None else _figures(worker, rates)
    return [
        *who,
        str(load.num_running),
        str(load.num_waiting),
        _bar(load.kv_blocks_used, worker.limits.kv_blocks_total),
        *figures,
        in_mb(worker.counters.rss_bytes),
    ]


def _figures(worker: Worker, rates: WorkerRates) -> list[str]:
    """A prefill worker's tokens are those of prompts; of one that does both, both are shown."""
    tokens = {
        Role.PREFILL: f"{rates.prefilled:.0f}",
        Role.DECODE: f"{rates.decoded:.0f}",
        Role.COLOCATED: f"{rates.prefilled:.0f} + {rates.decoded:.0f}",
    }[worker.role]
    handover = "-"
    if rates.handover_ms is not None and rates.decode_start_ms is not None:
        handover = f"{rates.handover_ms:.1f} → {rates.decode_start_ms:.1f}"
    return [tokens, in_mb(round(rates.kv_sent)), in_mb(round(rates.kv_received)), handover]


def _is_roomy() -> bool:
    return out.width >= _ROOMY


def _bar(used: int, total: int) -> str:
    share = used / total if total else 0.0
    if not _is_roomy():
        return f"{share:4.0%}"
    filled = round(share * _BAR_WIDTH)
    return f"[magenta]{'█' * filled}[/][dim]{'░' * (_BAR_WIDTH - filled)}[/] {share:4.0%}"
