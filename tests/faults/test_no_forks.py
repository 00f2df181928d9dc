"""No process of ours forks with gRPC's threads alive: children are other programs, started by exec."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.test_imports import modules

# A fork copies locks that no thread of the child will ever open; a pool of processes forks by default.
FORKING_MODULES = {"multiprocessing", "torch.multiprocessing", "pty"}
FORKING_NAMES = {"fork", "forkpty", "ProcessPoolExecutor", "preexec_fn", "share_memory_"}


def forking(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in FORKING_MODULES)
        elif isinstance(node, ast.ImportFrom):
            if node.module in FORKING_MODULES:
                yield str(node.module)
            yield from (alias.name for alias in node.names if alias.name in FORKING_NAMES)
        elif isinstance(node, ast.Attribute) and node.attr in FORKING_NAMES:
            yield node.attr
        elif isinstance(node, ast.keyword) and node.arg in FORKING_NAMES:
            yield str(node.arg)


@pytest.mark.parametrize(("module", "path"), [pytest.param(*each, id=each[0]) for each in modules()])
def test_no_module_forks(module: str, path: Path) -> None:
    found = list(forking(ast.parse(path.read_text(encoding="utf-8"))))
    assert found == [], f"{module} uses {found}"


def test_the_check_sees_what_it_looks_for() -> None:
    source = "import multiprocessing\nos.fork()\nsubprocess.Popen([], preexec_fn=f)\n"
    assert sorted(forking(ast.parse(source))) == ["fork", "multiprocessing", "preexec_fn"]
