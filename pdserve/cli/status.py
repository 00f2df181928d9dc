"""`pdserve status`."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated

import typer
from rich.table import Table

from pdserve.cli.console import out, write
from pdserve.cli.target import Address, Name, router_address
from pdserve.client import Client, Cluster, Worker, WorkerState

_TIMEOUT_S = 10.0


def status(
    address: Address = None,
    name: Name = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
) -> None:
    """Show the pools and their workers: state, load, and what each has computed and shipped.

    Examples:
        pdserve status
        pdserve status --json | python -m json.tool
    """
    cluster = asyncio.run(_get_cluster(router_address(address, name)))
    if as_json:
        write(json.dumps(as_object(cluster)) + "\n")
    else:
        show(cluster)


async def _get_cluster(address: str) -> Cluster:
    async with Client(address) as client:
        return await client.get_cluster(timeout=_TIMEOUT_S)


def as_object(cluster: Cluster) -> dict[str, object]:
    pools = {
        pool.role.value: {"target": pool.target, "workers": [_worker_object(each) for each in pool.workers]}
        for pool in cluster.pools
    }
    return {"name": cluster.name, "router": {"grpc": cluster.router_grpc}, "pools": pools}


def _worker_object(worker: Worker) -> dict[str, object]:
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
        "kv_blocks_total": worker.limits.kv_blocks_total,
        "tokens_prefilled": counters.tokens_prefilled,
        "tokens_decoded": counters.tokens_decoded,
        "kv_bytes_sent": counters.kv_bytes_sent,
        "kv_bytes_received": counters.kv_bytes_received,
        "reservations": load.num_reservations,
        "rss_bytes": counters.rss_bytes,
    }


_STYLES = {"READY": "green", "STARTING": "yellow", "DRAINING": "yellow", "UNHEALTHY": "red", "DEAD": "red"}


def show(cluster: Cluster) -> None:
    out.print(f"[bold]{cluster.name}[/]  model {cluster.model}  gRPC {cluster.router_grpc}")
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    workers = [worker for pool in cluster.pools for worker in pool.workers]
    # Of interest only where there are several.
    shows_node = len({worker.node for worker in workers if worker.node}) > 1
    for column in ("worker", "state", *(("node",) if shows_node else ()), "pid"):
        table.add_column(column, no_wrap=True)
    for column in ("run", "wait", "KV blocks", "prefilled", "decoded", "KV sent", "received", "RSS"):
        table.add_column(column, justify="right", no_wrap=True)
    for worker in workers:
        table.add_row(*_row(worker, shows_node))
    out.print(table)
    for pool in cluster.pools:
        if len(pool.workers) != pool.target:
            out.print(f"{pool.role.value}: {pool.target} wanted")
        if pool.unrecoverable_reason:
            is_gone = all(worker.state is not WorkerState.READY for worker in pool.workers)
            trouble = "cannot recover" if is_gone else "is not complete"
            out.print(f"[red]{pool.role.value} {trouble}:[/]", end=" ")
            out.print(pool.unrecoverable_reason, markup=False)
    for worker in workers:
        if worker.detail:
            out.print(f"{worker.id}: {worker.detail}", markup=False)


def _row(worker: Worker, shows_node: bool) -> list[str]:
    load, counters = worker.load, worker.counters
    style = _STYLES.get(worker.state.name, "dim")
    return [
        worker.id,
        f"[{style}]{worker.state.name}[/]",
        *((worker.node,) if shows_node else ()),
        str(worker.pid or ""),
        str(load.num_running),
        str(load.num_waiting),
        f"{load.kv_blocks_used}/{worker.limits.kv_blocks_total}",
        str(counters.tokens_prefilled),
        str(counters.tokens_decoded),
        in_mb(counters.kv_bytes_sent),
        in_mb(counters.kv_bytes_received),
        in_mb(counters.rss_bytes),
    ]


def in_mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f}M" if num_bytes < 1e8 else f"{num_bytes / 1e6:.0f}M"
