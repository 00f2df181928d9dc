"""`pdserve key new NAME`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from pdserve.cli.console import err, write
from router.access.keys import Permission, new_key

app = typer.Typer(name="key", no_args_is_help=True, help="Make API keys for a cluster's users.")


@app.callback()
def _keys() -> None:
    """Keeps `new` a command of its own, though it is the only one."""


@app.command("new")
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose it is: for the file and for messages.")],
    generate: Annotated[
        bool, typer.Option("--generate", metavar="", help="It may generate: so without any flag.")
    ] = False,
    admin: Annotated[
        bool,
        typer.Option("--admin", metavar="", help="It may look at the cluster, scale, drain and restart."),
    ] = False,
    metrics: Annotated[
        bool, typer.Option("--metrics", metavar="", help="It may read /metrics, as every key may.")
    ] = False,
    to: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Write the key there, as --api-key-file reads it."),
    ] = None,
) -> None:
    """Make an API key. The key is told on stderr, once, or goes to a new file that only you may read; the
    line for the file of `router.api_keys` goes to stdout, and holds its hash only.

    Examples:
        pdserve key new alice >> keys
        pdserve key new ops --generate --admin --out ops.key >> keys
    """
    flags = {Permission.GENERATE: generate, Permission.ADMIN: admin, Permission.METRICS: metrics}
    wanted = [permission for permission, is_wanted in flags.items() if is_wanted]
    try:
        key, line = new_key(name, wanted or [Permission.GENERATE])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if to is None:
        err.print("the key, which nobody can show again:", style="dim")
        err.print(key, markup=False)
    else:
        _save(key, to)
    write(line + "\n")


def _save(key: str, to: Path) -> None:
    """Into a new file: one that is there may hold a key of somebody's."""
    try:
        with open(os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(key + "\n")
    except OSError as error:
        raise typer.BadParameter(f"--out {to}: {error.strerror}") from None
