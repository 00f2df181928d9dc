"""Channels and servers between the cluster's parts are made in `trust` alone: one that is made elsewhere has
neither the secret nor TLS."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from cluster.folders import PACKAGES

ROOT = Path(__file__).parents[3]
MAKES = {
    "insecure_channel",
    "secure_channel",
    "add_insecure_port",
    "add_secure_port",
    "server",
}
# Where clients come in, and what is no part of a cluster: what each does.
ELSEWHERE = {
    "router/front/server.py": "serves clients",
    "pdserve/channel.py": "is a client's",
    "cluster/readiness.py": "asks the router as a client does",
    "cluster/actors/handles.py": "looks whether a Ray answers",
    "pdserve/bench/bare.py": "measures gRPC alone",
}


def made_in(path: Path) -> Iterator[str]:
    """Calls like `grpc.aio.insecure_channel(...)` and `server.add_insecure_port(...)`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MAKES:
            owner = ast.unparse(node.func.value)
            if node.func.attr != "server" or owner in ("grpc", "grpc.aio"):
                yield f"{owner}.{node.func.attr}"


def test_no_part_makes_a_channel_or_a_server_by_itself() -> None:
    paths = [path for package in sorted({*PACKAGES} - {"trust"}) for path in (ROOT / package).rglob("*.py")]
    found = {str(path.relative_to(ROOT)): list(made_in(path)) for path in paths}
    assert {name: made for name, made in found.items() if made and name not in ELSEWHERE} == {}


def test_what_it_looks_for_is_found_where_it_is() -> None:
    assert sorted(made_in(ROOT / "trust/servers.py")) == [
        "grpc.aio.server",
        "grpc.server",
        "server.add_insecure_port",
        "server.add_secure_port",
    ]
    assert len(list(made_in(ROOT / "trust/channels.py"))) == 4
