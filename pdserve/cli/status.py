"""`pdserve status`."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from pdserve.cli.console import error_line, out, write
from pdserve.cli.target import Choice, Target, asks_router
from pdserve.client import Cluster, PdserveError, Pool, Role, Worker, WorkerState

_TIMEOUT_S = 10.0
_WIDEST = 1000


@asks_router
def status(
    choice: Choice,
    as_json: Annotated[
        bool, typer.Option("--json", metavar="", help="One JSON object, for programs.")
    ] = False,
) -> None:
    """Show the pools and their workers: state, load, and what each has computed and shipped.

    Of all clusters that run here, if none is named.

    Examples:
        pdserve status
        pdserve status --json | python -m json.tool
    """
    several = choice.several()
    clusters = _those_that_answer(several) if several else [asyncio.run(_get_cluster(choice.target()))]
    if as_json:
        objects = [as_object(cluster) for cluster in clusters]
        write(json.dumps({"clusters": objects} if several else objects[0]) + "\n")
    else:
        for cluster in clusters:
            show(cluster)
    if len(clusters) < len(several):
        raise typer.Exit(1)


def _those_that_answer(several: list[tuple[str, Target]]) -> list[Cluster]:
    clusters = []
    for name, target in several:
        try:
            clusters.append(asyncio.run(_get_cluster(target)))
        except PdserveError as error:
            error_line(error, f"cluster {name}: ")
    return clusters


async def _get_cluster(target: Target) -> Cluster:
    async with target.client() as client:
        return await client.get_cluster(timeout=_TIMEOUT_S)


def as_object(cluster: Cluster) -> dict[str, object]:
    names = _names(cluster)
    pools = {
        pool.role.value: {
            "target": pool.target,
            "workers": [_worker_object(each, names) for each in pool.workers],
        }
        for pool in cluster.pools
    }
    router = {"grpc": cluster.router_grpc, "http": cluster.router_http, "tls": cluster.router_tls}
    routers = [asdict(each) for each in cluster.routers]
    return {"name": cluster.name, "router": router, "routers": routers, "pools": pools}


def _names(cluster: Cluster) -> dict[str, str]:
    """Worker ids by instance."""
    return {worker.instance_id: worker.id for pool in cluster.pools for worker in pool.workers}


def _worker_object(worker: Worker, names: dict[str, str]) -> dict[str, object]:
    load, counters = worker.load, worker.counters
    return {
        "id": worker.id,
        "pid": worker.pid,
        "address": worker.address,
        "node": worker.node,
        "state": worker.state.name,
        "detail": worker.detail,
        "device": worker.device,
        "running": load.num_running,
        "waiting": load.num_waiting,
        "kv_blocks_used": load.kv_blocks_used,
        "kv_blocks_quarantined": load.kv_blocks_quarantined,
        "kv_blocks_total": worker.limits.kv_blocks_total,
        "tokens_prefilled": counters.tokens_prefilled,
        "tokens_decoded": counters.tokens_decoded,
        "kv_bytes_sent": counters.kv_bytes_sent,
        "kv_bytes_received": counters.kv_bytes_received,
        "reservations": load.num_reservations,
        "rss_bytes": counters.rss_bytes,
        "draft_tokens": counters.draft_tokens,
        "accepted_draft_tokens": counters.accepted_draft_tokens,
        "kernels": worker.kernels or None,
        "speculation": worker.speculation,
        "transfers": [asdict(each) for each in worker.transfers],
        # To workers that are there no more, KV goes no more.
        "kv_routes": [
            {"to": names[route.instance_id], "transport": route.transport}
            for route in worker.kv_routes
            if route.instance_id in names
        ],
    }


STYLES = {"READY": "green", "STARTING": "yellow", "DRAINING": "yellow", "UNHEALTHY": "red", "DEAD": "red"}


def show(cluster: Cluster) -> None:
    http = f"  HTTP {cluster.http_url}" if cluster.http_url else ""
    where = f"model {cluster.model}  gRPC {cluster.router_grpc}{http}"
    out.print(f"[bold]{cluster.name}[/]  {escape(where)}")
    for line in (*router_lines(cluster), *pool_lines(cluster)):
        out.print(line, markup=False)
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    workers = [worker for pool in cluster.pools for worker in pool.workers]
    # Of interest only where there are several nodes, and where anything is drafted.
    shows_node = len({worker.node for worker in workers if worker.node}) > 1
    shows_drafts = any(worker.speculation for worker in workers)
    for column in ("worker", "state", *(("node",) if shows_node else ()), "pid"):
        table.add_column(column, no_wrap=True)
    drafted = ("drafts right",) if shows_drafts else ()
    for column in (
        "run",
        "wait",
        "KV blocks",
        "prefilled",
        "decoded",
        *drafted,
        "KV sent",
        "received",
        "RSS",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for worker in workers:
        table.add_row(*_row(worker, shows_node, shows_drafts))
    if workers:
        # No name and no figure is cut off: a narrow terminal goes on in its next line.
        table.width = Measurement.get(out, out.options.update(width=_WIDEST), table).maximum
        out.print(table)
    for line in (*engine_lines(cluster), *route_lines(cluster), *quarantine_lines(cluster)):
        out.print(line, markup=False)
    for pool in cluster.pools:
        if pool.unrecoverable_reason:
            is_gone = all(worker.state is not WorkerState.READY for worker in pool.workers)
            trouble = "cannot recover" if is_gone else "is not complete"
            out.print(f"[red]{pool.role.value} {trouble}:[/]", end=" ")
            out.print(pool.unrecoverable_reason, markup=False)
    for worker in workers:
        if worker.detail:
            out.print(f"{worker.id}: {worker.detail}", markup=False)


def router_lines(cluster: Cluster) -> list[str]:
    """Where there are several, or one is away."""
    if len(cluster.routers) <= 1 and not any(router.detail for router in cluster.routers):
        return []
    return [
        f"{router.id} gRPC {router.grpc}"
        f"{f'  HTTP {cluster.scheme}://{router.http}' if router.http else ''}"
        f"{f': {router.detail}' if router.detail else ''}"
        for router in cluster.routers
    ]


def engine_lines(cluster: Cluster) -> list[str]:
    """By what the workers compute and how they draft, workers alike in one line."""
    workers = [worker for pool in cluster.pools for worker in pool.workers]
    lines = []
    for title, told in (
        ("kernels", {worker.id: worker.kernels for worker in workers if worker.kernels}),
        ("speculation", {worker.id: worker.speculation for worker in workers if worker.speculation}),
    ):
        for text in dict.fromkeys(told.values()):
            names = [name for name, of_name in told.items() if of_name == text]
            of = "" if len(names) == len(workers) else f" of {', '.join(names)}"
            lines.append(f"{title}{of}: {text}")
    return lines


def route_lines(cluster: Cluster) -> list[str]:
    """How KV goes from each prefill worker that has sent any, and how long a hand-over takes."""
    names = _names(cluster)
    lines = []
    for pool in cluster.pools:
        for worker in pool.workers:
            ways = [
                f"{names[route.instance_id]} by {route.transport}"
                for route in worker.kv_routes
                if route.instance_id in names
            ]
            if ways:
                lines.append(f"KV of {worker.id} goes to {', '.join(ways)}")
            for each in worker.transfers:
                if each.num_started:
                    ready, start = (ms / each.num_started for ms in (each.handover_ms, each.decode_start_ms))
                    lines.append(
                        f"KV to {worker.id} by {each.transport}: whole {ready:.1f} ms after the first token, "
                        f"first step after {start:.1f} ms (means of {each.num_started})"
                    )
    return lines


def quarantine_lines(cluster: Cluster) -> list[str]:
    """Who keeps blocks of whom from being used."""
    workers = [worker for pool in cluster.pools for worker in pool.workers]
    by_process = {(worker.node, worker.pid): worker.id for worker in workers}
    return [
        f"{worker.id}: {each.num_blocks} KV blocks have waited {each.age_ms / 1000:.0f} s for "
        f"{by_process.get((worker.node, each.sender_pid), f'process {each.sender_pid}')}, "
        "which might still write them"
        for worker in workers
        for each in worker.quarantines
    ]


def pool_lines(cluster: Cluster) -> list[str]:
    """Of each pool how many workers are ready, how many there should be, and what that means."""
    num_ready = {pool.role: _num_ready(pool) for pool in cluster.pools}
    pairs = min(num_ready.get(Role.PREFILL, 0), num_ready.get(Role.DECODE, 0))
    is_served = pairs or num_ready.get(Role.COLOCATED, 0)
    lines = []
    for pool in cluster.pools:
        waits = not is_served and not num_ready[pool.role] and not pool.unrecoverable_reason
        told = ": requests wait" if waits else ""
        lines.append(f"{pool.role.value} {num_ready[pool.role]} of {pool.target}{told}")
    return lines


def _num_ready(pool: Pool) -> int:
    return sum(worker.state is WorkerState.READY for worker in pool.workers)


def _row(worker: Worker, shows_node: bool, shows_drafts: bool) -> list[str]:
    """Without numbers where there are none yet, or only those of a process that is gone."""
    load, counters = worker.load, worker.counters
    style = STYLES.get(worker.state.name, "dim")
    who = [worker.id, f"[{style}]{worker.state.name}[/]", *((worker.node,) if shows_node else ())]
    if worker.state in (WorkerState.STOPPED, WorkerState.DEAD):
        return who
    who.append(str(worker.pid or ""))
    if worker.state is WorkerState.STARTING:
        return who
    return [
        *who,
        str(load.num_running),
        str(load.num_waiting),
        f"{load.kv_blocks_used}/{worker.limits.kv_blocks_total}",
        str(counters.tokens_prefilled),
        str(counters.tokens_decoded),
        *((f"{counters.accepted_draft_tokens}/{counters.draft_tokens}",) if shows_drafts else ()),
        in_mb(counters.kv_bytes_sent),
        in_mb(counters.kv_bytes_received),
        in_mb(counters.rss_bytes),
    ]


def in_mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f}M" if num_bytes < 1e8 else f"{num_bytes / 1e6:.0f}M"
