"""`pdserve key new NAME`."""

from __future__ import annotations

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
        bool, typer.Option("--admin", metavar="", help="It may look at the cluster, scale and drain.")
    ] = False,
    metrics: Annotated[
        bool, typer.Option("--metrics", metavar="", help="It may read /metrics, as every key may.")
    ] = False,
) -> None:
    """Make an API key. The key is told on stderr, once; the line for the file of `router.api_keys` goes to
    stdout, and holds its hash only.

    Examples:
        pdserve key new alice >> keys
        pdserve key new ops --generate --admin >> keys
    """
    flags = {Permission.GENERATE: generate, Permission.ADMIN: admin, Permission.METRICS: metrics}
    wanted = [permission for permission, is_wanted in flags.items() if is_wanted]
    try:
        key, line = new_key(name, wanted or [Permission.GENERATE])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    err.print("the key, which nobody can show again:", style="dim")
    err.print(key, markup=False)
    write(line + "\n")
