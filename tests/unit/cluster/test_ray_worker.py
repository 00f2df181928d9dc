"""A worker's actor as the controller starts and ends it; Ray itself is in tests/cluster."""

from __future__ import annotations

import asyncio
import threading

import pytest

from cluster.actors import ray_worker
from cluster.actors.ray_worker import RayWorker
from cluster.config import KVTransferConfig, PoolConfig
from cluster.control.worker_handle import WorkerGone, WorkerSpec
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


async def test_one_that_is_given_up_while_it_is_made_is_ended_as_soon_as_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_making, may_be_there = threading.Event(), threading.Event()
    actor, killed = object(), []

    def create(*_: object) -> object:
        is_making.set()
        assert may_be_there.wait(20)
        return actor

    monkeypatch.setattr(ray_worker, "_where", lambda spec: None)
    monkeypatch.setattr(ray_worker, "packed", lambda environment: None)
    monkeypatch.setattr(ray_worker, "_create", create)
    monkeypatch.setattr(ray_worker, "kill_actor", lambda actor, process: killed.append(actor))
    worker = RayWorker(TRUST, SPEC)
    starting = asyncio.ensure_future(anext(worker.start()))
    assert await asyncio.to_thread(is_making.wait, 20)
    worker.kill()
    assert killed == []
    may_be_there.set()
    with pytest.raises(WorkerGone, match="given up"):
        await asyncio.wait_for(starting, 20)
    assert killed == [actor]
