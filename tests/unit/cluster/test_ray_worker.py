"""A worker's actor as the controller starts and ends it; Ray itself is in tests/cluster."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from unittest.mock import Mock

import pytest

import cluster
from cluster.actors import ray_worker, worker_actor
from cluster.actors.ray_worker import RayWorker
from cluster.config import KVTransferConfig, PoolConfig
from cluster.control.worker_handle import Loading, WorkerGone, WorkerSpec
from cluster.nodes.processes import ProcessId
from engine.config import ModelConfig
from observability.config import ObservabilityConfig
from tests.trusted import TRUST
from worker.identity import Role

SPEC = WorkerSpec(
    "c",
    "decode-0",
    "key",
    Role.DECODE,
    ModelConfig(),
    PoolConfig(),
    KVTransferConfig(),
    ObservabilityConfig(),
)


@dataclass
class Making:
    """Ray takes its time to make the actor."""

    is_begun: threading.Event = field(default_factory=threading.Event)
    may_end: threading.Event = field(default_factory=threading.Event)
    actor: object = field(default_factory=object)
    killed: list[object] = field(default_factory=list)

    def create(self, *_: object) -> object:
        self.is_begun.set()
        assert self.may_end.wait(20)
        return self.actor


@pytest.fixture
def making(monkeypatch: pytest.MonkeyPatch) -> Making:
    made = Making()
    monkeypatch.setattr(ray_worker, "_where", lambda spec: None)
    monkeypatch.setattr(ray_worker, "packed", lambda environment: None)
    monkeypatch.setattr(ray_worker, "_create", made.create)
    monkeypatch.setattr(ray_worker, "kill_actor", lambda actor, process: made.killed.append(actor))
    return made


async def test_one_that_is_given_up_while_it_is_made_is_ended_as_soon_as_it_is_there(making: Making) -> None:
    worker = RayWorker(TRUST, SPEC)
    starting = asyncio.ensure_future(anext(worker.start()))
    assert await asyncio.to_thread(making.is_begun.wait, 20)
    worker.kill()
    assert making.killed == []
    making.may_end.set()
    with pytest.raises(WorkerGone, match="given up"):
        await asyncio.wait_for(starting, 20)
    assert making.killed == [making.actor]


async def test_one_whose_start_took_too_long_is_ended_as_soon_as_it_is_there(making: Making) -> None:
    """Nobody waits for it any more: it would hold its place in Ray for ever."""
    worker = RayWorker(TRUST, SPEC)
    starting = asyncio.ensure_future(anext(worker.start()))
    assert await asyncio.to_thread(making.is_begun.wait, 20)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    worker.kill()
    making.may_end.set()
    for _ in range(1000):
        if making.killed:
            break
        await asyncio.sleep(0.01)
    assert making.killed == [making.actor]


async def test_a_pid_of_another_machine_of_the_same_name_is_no_process_here(
    making: Making, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has that pid here would be killed in the worker's place."""
    mine = ProcessId.of(os.getpid())
    there = Loading(socket.gethostname(), mine.pid, "loads", mine.model_copy(update={"boot": "another"}))

    async def told(*_: object) -> AsyncIterator[asyncio.Future[Loading]]:
        event = asyncio.get_running_loop().create_future()
        event.set_result(there)
        yield event

    killed: list[ProcessId | None] = []
    making.actor = Mock()
    making.may_end.set()
    monkeypatch.setattr(ray_worker, "_with_patience", told)
    monkeypatch.setattr(ray_worker, "kill_actor", lambda actor, process: killed.append(process))
    worker = RayWorker(TRUST, SPEC)
    async for event in worker.start():
        assert event is there
    worker.kill()
    assert [process and process.find() for process in killed] == [None]


def test_a_worker_starts_where_a_folder_has_the_name_of_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a folder, where `up` runs, goes before an editable install, and has no file."""
    monkeypatch.setattr(cluster, "__file__", None)
    for name in ("die_with_parent", "live_past_nccl", "_node_address"):
        monkeypatch.setattr(worker_actor, name, lambda: "127.0.0.1")
    worker_actor.WorkerActor(SPEC)
