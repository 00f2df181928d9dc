"""A worker's signs of life, and what its log says of a thread that is stuck."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from engine.progress import Progress
from tests.integration.router.harness import until
from worker.heartbeat import Heartbeat

# Longer than from one beat to the next.
STUCK_AFTER_S = 1.0


async def test_it_tells_what_the_engine_does() -> None:
    progress = Progress()
    heartbeat = Heartbeat("decode-0", progress)
    heartbeat.start()
    try:
        progress.is_working = True
        progress.stepped(12.0)
        with progress.compiling():
            vitals = heartbeat.vitals()
        assert (vitals.progress, vitals.is_working, vitals.is_compiling, vitals.step_ms) == (
            1,
            True,
            True,
            12,
        )
        assert vitals.heartbeat_age_ms < 30_000
    finally:
        heartbeat.stop()


async def test_where_the_engine_is_stuck_is_in_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    progress, let_go = Progress(), threading.Event()

    def compute_for_ever() -> None:
        let_go.wait(60)

    engine = threading.Thread(target=compute_for_ever, name="engine")
    engine.start()
    heartbeat = Heartbeat("decode-0", progress, STUCK_AFTER_S)
    heartbeat.start()
    with caplog.at_level(logging.WARNING, "worker.heartbeat"):
        progress.is_working = True
        await until(lambda: bool(caplog.records), 20.0)
        # Longer than it takes to be told again.
        await asyncio.sleep(1.2)
    heartbeat.stop()
    let_go.set()
    engine.join()
    (record,) = caplog.records
    assert "worker=decode-0 the engine has not gone on" in record.message
    assert "compute_for_ever" in record.message


async def test_where_the_loop_is_stuck_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    heartbeat = Heartbeat("decode-0", Progress(), STUCK_AFTER_S)
    heartbeat.start()
    with caplog.at_level(logging.WARNING, "worker.heartbeat"):
        stand_in_the_way()
    heartbeat.stop()
    assert "the loop that serves has not gone on" in caplog.text
    assert "stand_in_the_way" in caplog.text


def stand_in_the_way() -> None:
    threading.Event().wait(2.5)
