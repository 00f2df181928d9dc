"""`pdserve`: one file for each command; this one gathers them and turns errors into exit codes.

0: done. 1: failed, with one line that says why. 2: wrong usage. 130: interrupted. Ray and torch are loaded
only by the commands that start something.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from cluster.config_file import ConfigError
from cluster.errors import ClusterError
from pdserve import __version__
from pdserve.bench.errors import BenchError
from pdserve.cli import bench, check, demo, down, drain, generate, key, restart, scale, status, top, up
from pdserve.cli.console import error_line, out
from pdserve.v1.errors import PdserveError

app = typer.Typer(
    name="pdserve",
    no_args_is_help=True,
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help=f"""Serve language models with prefill and decode on separate worker pools.

The way around:
    pdserve up cluster_configs/local-cpu.yaml
    pdserve generate --chat "{demo.QUESTION}"
    pdserve status
    pdserve top
    pdserve scale prefill=2 decode=2
    pdserve down

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.""",
)


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", metavar="", help="Show the version.", is_eager=True)
    ] = False,
) -> None:
    if version:
        out.print(__version__)
        raise typer.Exit()


app.command("check")(check.check)
app.command("up")(up.up)
app.command("status")(status.status)
app.command("top")(top.top)
app.command("generate")(generate.generate)
app.command("scale")(scale.scale)
app.command("drain")(drain.drain)
app.command("restart")(restart.restart)
app.command("down")(down.down)
app.command("demo")(demo.demo)
app.add_typer(key.app)
app.add_typer(bench.app)


def run() -> None:
    try:
        app()
    # Of the system's own, a disk that is full where stdout goes to: no mistake of ours that needs its stack.
    except (BenchError, ClusterError, ConfigError, PdserveError, OSError) as error:
        error_line(error)
        sys.exit(1)
