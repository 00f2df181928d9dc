"""The keeper of a router, on children that only say that they run. Real processes, no Ray."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from cluster.actors import router_actor
from cluster.actors.router_actor import RouterActor
from cluster.nodes.network import Bind
from tests.unit.cluster.harness import config

# It drains for ever: whatever comes by its stdin is not read.
ROUTER = """#!/bin/sh
echo '{"grpc": "127.0.0.1:1"}'
while :; do echo; sleep 0.05; done
"""


@pytest_asyncio.fixture
async def keeper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[RouterActor]:
    """One whose router serves. It guards no controller."""
    (tmp_path / "logs").mkdir()
    router = tmp_path / "router"
    router.write_text(ROUTER)
    router.chmod(0o700)
    monkeypatch.setattr(router_actor, "die_with_parent", lambda: None)
    monkeypatch.setattr(router_actor, "log_to", lambda *_: None)
    monkeypatch.setattr(sys, "executable", str(router))
    actor = RouterActor(config(1, 1), str(tmp_path), Bind.LOOPBACK, 0)
    await actor._start_child()
    actor._tasks.repeat(actor._supervise, "supervise")
    yield actor
    children = [*actor._retiring, actor._child]
    await actor.stop()
    actor._log_file.close()
    for child in filter(None, children):
        await asyncio.wait_for(child.communicate(), 20)


async def another_than(keeper: RouterActor, *pids: int) -> int:
    for _ in range(2000):
        pid = await keeper.ping()
        if pid is not None and pid not in pids:
            return pid
        await asyncio.sleep(0.01)
    raise TimeoutError("there is no other router")


async def test_a_router_that_ends_has_another_in_its_place(keeper: RouterActor) -> None:
    pid = await another_than(keeper)
    os.kill(pid, signal.SIGKILL)
    await another_than(keeper, pid)


async def test_a_new_router_that_ends_is_replaced_while_the_one_before_it_drains(keeper: RouterActor) -> None:
    before = await another_than(keeper)
    await keeper.restart(drain_s=300)
    new = await another_than(keeper, before)
    os.kill(new, signal.SIGKILL)
    await another_than(keeper, before, new)
    os.kill(before, 0)  # it drains on


async def test_a_router_that_was_restarted_and_ends_at_last_takes_nobody_along(keeper: RouterActor) -> None:
    before = keeper._child
    assert before is not None
    await keeper.restart(drain_s=300)
    new = await another_than(keeper, before.pid)
    num_restarts = keeper.num_restarts
    before.kill()
    await asyncio.wait_for(before.wait(), 20)
    await asyncio.sleep(0.2)
    assert (await keeper.ping(), keeper.num_restarts) == (new, num_restarts)
