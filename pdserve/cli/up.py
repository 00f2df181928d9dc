"""`pdserve up FILE`."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from cluster.config_file import load_config
from cluster.state import read_record
from pdserve.cli.console import INTERRUPTED, err, left_behind, out
from pdserve.cli.steps import shown_steps

File = Annotated[
    Path,
    typer.Argument(
        metavar="FILE", help="The cluster's YAML file.", exists=True, dir_okay=False, readable=True
    ),
]


def up(file: File) -> None:
    """Start a cluster, and return when it can serve a request.

    Nothing is left behind if something fails or you press Ctrl-C meanwhile.

    Example:
        pdserve up cluster_configs/local-cpu.yaml
    """
    config = load_config(file)
    for told in config.router.open_addresses():
        err.print(told, style="yellow", markup=False)
    signal.signal(signal.SIGTERM, interrupted)
    begun = time.monotonic()
    with shown_steps() as tell:
        try:
            from cluster import launch  # resolving models is heavy, and `--help` need not wait for it

            launched = launch.up(config, tell)
        except KeyboardInterrupt:
            is_ended = read_record(config.name) is None
            ended = "interrupted: all that was started has been ended"
            err.print(ended if is_ended else left_behind(config.name))
            raise typer.Exit(INTERRUPTED) from None
    scheme = "https" if launched.is_tls else "http"
    url = f"{scheme}://{launched.http}"
    http = f" and HTTP at [bold]{url}[/]" if launched.http else ""
    out.print(
        f"[bold green]{launched.name}[/] serves gRPC at [bold]{launched.router}[/]{http} "
        f"after {time.monotonic() - begun:.1f} s (logs: {launched.log_folder})"
    )
    for number, router in enumerate(launched.routers[1:], start=1):
        served = config.router.replica(number).http
        out.print(
            f"  router-{number}: gRPC at {router}{f' and HTTP at {scheme}://{served}' if served else ''}"
        )
    name = f" --name {launched.name}"
    out.print(f'  pdserve generate{name} --chat "What is the capital of France?"')
    out.print(f"  pdserve status{name}")
    out.print(f"  pdserve down {launched.name}")
    if launched.http:
        out.print(f"  look inside: {url}/  metrics: {url}/metrics")
    else:
        out.print("  no page, and no metrics to scrape: router.http is not set")


def interrupted(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
