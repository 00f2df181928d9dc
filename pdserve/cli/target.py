"""Which router a command speaks to, and what it shows there.

`--address`, `--name`, or the only cluster that runs here. Where that one's ports want keys or TLS, commands
go by the socket in its folder, which wants neither: whoever may enter that may do everything.
"""

from __future__ import annotations

import inspect
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Concatenate, ParamSpec, TypeVar

import typer

from cluster.config import split_address
from cluster.state import ClusterRecord, find_cluster, running_clusters
from pdserve.client import Client, Credentials
from router.access.certificates import check_authorities, check_certificates, check_key

_CONNECT_TIMEOUT_S = 2.0
API_KEY_VARIABLE = "PDSERVE_API_KEY"
P = ParamSpec("P")
R = TypeVar("R")


def _checked_address(address: str | None) -> str | None:
    if address is not None:
        try:
            split_address(address)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
    return address


def _file(option: str, variable: str, told: str) -> object:
    return Annotated[
        Path | None,
        typer.Option(option, metavar="FILE", exists=True, dir_okay=False, envvar=variable, help=told),
    ]


_OPTIONS: dict[str, object] = {
    "address": Annotated[
        str | None,
        typer.Option(
            "--address",
            "-a",
            metavar="HOST:PORT",
            callback=_checked_address,
            help="The router to speak to, wherever it runs.",
        ),
    ],
    "name": Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="A cluster that runs here. Default: the only one."),
    ],
    # A key on the command line could be read by whoever lists processes.
    "api_key_file": _file(
        "--api-key-file", "PDSERVE_API_KEY_FILE", f"Holds the API key. Default: ${API_KEY_VARIABLE}."
    ),
    "tls": Annotated[
        bool,
        typer.Option(
            "--tls", metavar="", envvar="PDSERVE_TLS", help="By TLS, with a certificate of a public CA."
        ),
    ],
    "ca": _file("--ca", "PDSERVE_CA", "By TLS, with a certificate of this CA (PEM)."),
    "cert": _file("--cert", "PDSERVE_CERT", "The caller's own certificate (PEM), with --key."),
    "key": _file("--key", "PDSERVE_KEY", "The key of --cert (PEM)."),
}


@dataclass(frozen=True, slots=True)
class Target:
    """A router."""

    address: str
    credentials: Credentials = field(default_factory=Credentials)

    def client(self) -> Client:
        shown = self.credentials
        return Client(
            self.address, api_key=shown.api_key, tls=shown.tls, ca=shown.ca, cert=shown.cert, key=shown.key
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """What was said of the router to speak to."""

    address: str | None
    name: str | None
    credentials: Credentials

    def target(self) -> Target:
        """Raises StateError where that is none or more than one."""
        if self.address is not None:
            return Target(self.address, self.credentials)
        return self._of(find_cluster(self.name))

    def several(self) -> list[tuple[str, Target]]:
        """All clusters that run here, if none is named and there are at least two; else none."""
        running = running_clusters() if self.address is None and self.name is None else []
        return [(record.name, self._of(record)) for record in running] if len(running) > 1 else []

    def _of(self, record: ClusterRecord) -> Target:
        # Neither its socket nor a port without TLS has a certificate to look at.
        shown = replace(self.credentials, tls=False, ca=None, cert=None, key=None)
        return Target(_answering(record.routers, record.doors()), shown)


def _answering(routers: Sequence[str], doors: Sequence[str]) -> str:
    """Of several routers the door of the first at whose port somebody is."""
    for router, door in zip(routers, doors, strict=True) if len(routers) > 1 else ():
        try:
            socket.create_connection(split_address(router), _CONNECT_TIMEOUT_S).close()
        except OSError:
            continue
        return door
    return doors[0]


def asks_router(command: Callable[Concatenate[Choice, P], R]) -> Callable[..., R]:
    """A command with the options that say which router it asks, in place of its first parameter."""
    asked = inspect.signature(command, eval_str=True)
    own = list(asked.parameters.values())[1:]
    keyword = inspect.Parameter.KEYWORD_ONLY
    added = [
        inspect.Parameter(name, keyword, default=False if name == "tls" else None, annotation=kind)
        for name, kind in _OPTIONS.items()
    ]
    parameters = [*(parameter.replace(kind=keyword) for parameter in own), *added]

    @wraps(command)
    def run(*args: P.args, **given: P.kwargs) -> R:
        said = {name: given.pop(name, None) for name in _OPTIONS}
        return command(_choice(**said), *args, **given)  # type: ignore[arg-type]

    # What typer reads in place of the command's own.
    run.__signature__ = asked.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _choice(
    address: str | None,
    name: str | None,
    api_key_file: Path | None,
    tls: bool | None,
    ca: Path | None,
    cert: Path | None,
    key: Path | None,
) -> Choice:
    if address is not None and name is not None:
        raise typer.BadParameter("give --address or --name, not both")
    try:
        credentials = Credentials(_api_key(api_key_file), bool(tls), ca, cert, key)
    except ValueError:
        raise typer.BadParameter("--cert and --key go together") from None
    if address is not None:
        _check_files(credentials)
    return Choice(address, name, credentials)


def _check_files(shown: Credentials) -> None:
    """As a router checks its own: of a handshake that failed little can be told."""
    option = "--ca"
    try:
        if shown.ca is not None:
            check_authorities(shown.ca)
        if shown.cert is not None and shown.key is not None:
            option = "--cert"
            check_certificates(shown.cert)
            option = "--key"
            check_key(shown.key, shown.cert)
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {error}") from None


def _api_key(file: Path | None) -> str | None:
    if file is None:
        return os.environ.get(API_KEY_VARIABLE) or None
    try:
        words = file.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"--api-key-file {file}: cannot be read: {error}") from None
    if len(words) != 1:
        raise typer.BadParameter(f"--api-key-file {file}: holds the key and nothing else")
    return words[0]
