"""A worker's signs of life, and what its log says of a thread that is stuck."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from engine.progress import Progress
from tests.integration.router.harness import until
from worker import heartbeat as heartbeats
from worker.heartbeat import Heartbeat

# Longer than from one beat to the next.
STUCK_AFTER_S = 1.0


@dataclass
class Clock:
    """Stands for the module `time`, and for the event by which the thread waits for its next beat."""

    now: float = 0.0
    # How long each wait takes; behind them the heartbeat is stopped.
    waits_s: list[float] = field(default_factory=list)

    def monotonic(self) -> float:
        return self.now

    def wait(self, timeout_s: float) -> bool:
        if not self.waits_s:
            return True
        self.now += self.waits_s.pop(0)
        return False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(heartbeats, "time", clock)
    return clock


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


async def test_a_beat_while_the_clock_is_read_is_no_negative_age(monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat = Heartbeat("decode-0", Progress())
    heartbeat.start()

    def monotonic() -> float:
        now = time.monotonic()
        heartbeat._beat_at = now + 0.01
        return now

    try:
        with monkeypatch.context() as patched:
            patched.setattr("worker.heartbeat.time", SimpleNamespace(monotonic=monotonic))
            vitals = heartbeat.vitals()
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


async def test_its_age_is_the_time_since_its_thread_last_ran(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "_BEAT_EVERY_S", 60.0)
    heartbeat = Heartbeat("decode-0", Progress())
    heartbeat.start()
    try:
        clock.now = 7.0
        assert heartbeat.vitals().heartbeat_age_ms == 7000
    finally:
        heartbeat.stop()


@pytest.mark.parametrize(
    ("waits_s", "told"),
    [
        # The whole process was stopped for a minute: nobody in it is stuck.
        ([0.5, 60.0, 0.5], []),
        ([0.5] * 12, ["the loop that serves", "the engine"]),
    ],
)
async def test_a_process_that_was_stopped_takes_nobody_in_it_for_stuck(
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    waits_s: list[float],
    told: list[str],
) -> None:
    progress = Progress()
    progress.is_working = True
    clock.waits_s = waits_s
    heartbeat = Heartbeat("decode-0", progress)
    heartbeat._loop = asyncio.get_running_loop()
    monkeypatch.setattr(heartbeat, "_stopped", clock)
    with caplog.at_level(logging.WARNING, "worker.heartbeat"):
        # In the way of the loop, whose answers therefore do not come.
        heartbeat._run()
    assert [what for what in ("the loop that serves", "the engine") if what in caplog.text] == told
