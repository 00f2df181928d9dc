"""Imports only go down the floors, and heavy or outward libraries stay on theirs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.folders import PACKAGES

ROOT = Path(__file__).parents[2]
CLIENT_MODULES = {
    "pdserve",
    "pdserve.answers",
    "pdserve.channel",
    "pdserve.client",
    "pdserve.cluster_results",
    "pdserve.requests",
    "pdserve.results",
}
WORKER_FLOOR = {"observability", "trust", "engine", "kv_transfer", "worker", "pdserve.v1"}
# What the modules of each floor may import of ours.
MAY_IMPORT = {
    "pdserve.v1": {"pdserve.v1"},
    "observability": {"observability"},
    "trust": {"trust", "pdserve.v1"},
    "engine": {"engine"},
    "kv_transfer": {"engine", "kv_transfer", "trust", "pdserve.v1"},
    "worker": WORKER_FLOOR,
    "prefill_worker": WORKER_FLOOR | {"prefill_worker"},
    "decode_worker": WORKER_FLOOR | {"decode_worker"},
    "router": {"observability", "trust", "router", "pdserve.v1"},
    "cluster": WORKER_FLOOR | {"prefill_worker", "decode_worker", "router", "cluster"},
    "client": CLIENT_MODULES | {"pdserve.v1"},
    "pdserve.bench": {
        "pdserve.v1",
        "pdserve.bench",
        "pdserve.client",
        "cluster",
        "router",
        "worker",
        "kv_transfer",
        "trust",
        "engine",
    },
    "pdserve.cli": {
        "pdserve",
        "pdserve.v1",
        "pdserve.bench",
        "pdserve.cli",
        "pdserve.client",
        "cluster",
        "router",
        "engine",
    },
}
# The only floors that may import these libraries of others.
ONLY_IN = {
    "ray": {"cluster"},
    "torch": {"engine", "kv_transfer", "pdserve.bench"},
    "transformers": {"engine"},
    "llguidance": {"engine", "router", "pdserve.v1"},
    "grpc": {
        "pdserve.v1",
        "trust",
        "kv_transfer",
        "worker",
        "prefill_worker",
        "decode_worker",
        "router",
        "cluster",
        "client",
        "pdserve.bench",
    },
    "starlette": {"router"},
    "uvicorn": {"router"},
    "aiohttp": {"pdserve.bench"},
    "cryptography": {"router"},
    "prometheus_client": {"router", "worker"},
    "opentelemetry": {"observability"},
    "pythonjsonlogger": {"observability"},
    "matplotlib": {"pdserve.bench"},
    "typer": {"pdserve.cli"},
    "rich": {"pdserve.cli"},
}
OURS = set(PACKAGES)


def modules() -> Iterator[tuple[str, Path]]:
    for package in sorted(OURS):
        for path in sorted((ROOT / package).rglob("*.py")):
            yield ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), path


def floor(module: str) -> str:
    """Of one of our modules."""
    if module in CLIENT_MODULES:
        return "client"
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "pdserve" else parts[0]


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield str(node.module)
            # `from pdserve import v1` names a module too.
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module == "pdserve")


def allowed_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] != "pdserve":
        return parts[0]
    known = CLIENT_MODULES | {"pdserve.v1", "pdserve.bench", "pdserve.cli"}
    return ".".join(parts[:2]) if ".".join(parts[:2]) in known else "pdserve"


@pytest.mark.parametrize(("module", "path"), [pytest.param(*each, id=each[0]) for each in modules()])
def test_imports_only_go_down(module: str, path: Path) -> None:
    for name in imported(path):
        if name.split(".")[0] in OURS:
            assert allowed_name(name) in MAY_IMPORT[floor(module)], f"{module} imports {name}"
        owners = ONLY_IN.get(name.split(".")[0])
        assert owners is None or floor(module) in owners, f"{module} imports {name}"
