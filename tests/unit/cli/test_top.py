"""`pdserve top`: rates from snapshots, and what a screen shows."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
from rich.console import Group

from pdserve.cli import top
from pdserve.cli.console import out
from pdserve.cli.rates import Rates
from pdserve.cli.target import Target
from pdserve.cli.top import screen
from pdserve.client import Cluster, Pool, Role, Unavailable, Worker, WorkerState
from pdserve.cluster_results import Quarantine, TransferCounters
from tests.unit.cli.test_shown import cluster, pool, worker


def counted(
    role: Role, instance: str = "i", tokens: int = 0, num_bytes: int = 0, num_started: int = 0
) -> Worker:
    made = worker(role, WorkerState.READY)
    counters = replace(
        made.counters,
        tokens_prefilled=tokens if role is not Role.DECODE else 0,
        tokens_decoded=tokens if role is not Role.PREFILL else 0,
        kv_bytes_sent=num_bytes if role is Role.PREFILL else 0,
        kv_bytes_received=num_bytes if role is Role.DECODE else 0,
    )
    over = TransferCounters(
        "shm", num_started, num_bytes, 0.0, 0, num_started, 2.0 * num_started, 3.5 * num_started
    )
    return replace(made, instance_id=instance, counters=counters, transfers=(over,))


def of(*workers: Worker) -> Cluster:
    return cluster(*(Pool(each.role, 1, (each,), None) for each in workers))


def test_rates_are_the_differences_of_the_last_seconds() -> None:
    rates = Rates()
    for second in range(20):
        # From second 10 on it does nothing.
        done = min(second, 10)
        shown = counted(Role.DECODE, "d", 30 * done, 1_000_000 * done, 2 * done)
        rates.add(of(shown), 100.0 + second)
        told = rates.of(shown)
        if second == 0:
            assert told is None
        elif second <= 10:
            assert told is not None
            assert told.decoded == pytest.approx(30)
            assert told.kv_received == pytest.approx(1e6)
            assert told.handover_ms == pytest.approx(2.0)
            assert told.decode_start_ms == pytest.approx(3.5)
    assert told is not None
    assert told.decoded == 0
    assert told.handover_ms is None


def test_a_new_process_at_an_old_place_begins_at_nothing() -> None:
    rates = Rates()
    rates.add(of(counted(Role.PREFILL, "old", 5000)), 1.0)
    fresh = counted(Role.PREFILL, "new", 10)
    rates.add(of(fresh), 2.0)
    assert rates.of(fresh) is None
    rates.add(of(counted(Role.PREFILL, "new", 110)), 3.0)
    told = rates.of(fresh)
    assert told is not None
    assert told.prefilled == pytest.approx(100)


def shown(of: Cluster, rates: Rates, trouble: str | None = None) -> list[str]:
    with out.capture() as captured:
        out.print(screen(of, rates, trouble))
    return captured.get().splitlines()


def row(lines: list[str], start: str) -> list[str]:
    (found,) = (line for line in lines if line.startswith(start))
    return found.split()


def test_the_screen_shows_what_clients_feel_and_what_workers_do() -> None:
    rates = Rates()
    for second in (0, 1):
        prefill = counted(Role.PREFILL, "p", 800 * second, 20_000_000 * second)
        decode = counted(Role.DECODE, "d", 90 * second, 20_000_000 * second, 3 * second)
        rates.add(of(prefill, decode), float(second))
    lines = shown(of(prefill, decode), rates)
    assert lines[1].split()[:2] == ["running", "queued"]
    assert lines[2].split() == [
        "3",
        "1",
        "210",
        "/",
        "480",
        "11",
        "/",
        "25",
        "45.5",
        "120",
        "7",
        "in",
        "10",
        "s",
    ]
    told = row(lines, "prefill-0")
    assert told[:4] == ["prefill-0", "READY", "1", "2"]
    assert told[5:] == ["9%", "800", "20.0M", "0.0M", "-", "1000M"]
    told = row(lines, "decode-0")
    assert told[5:] == ["9%", "90", "0.0M", "20.0M", "2.0", "→", "3.5", "1000M"]


def test_no_figure_is_cut_off_in_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out, "_width", 80)
    rates = Rates()
    for second in (0, 1):
        prefill = counted(Role.PREFILL, "p", 9500 * second, 230_000_000 * second)
        decode = counted(Role.DECODE, "d", 1200 * second, 230_000_000 * second, 3 * second)
        rates.add(of(prefill, decode), float(second))
    with out.capture() as captured:
        out.print(screen(of(prefill, decode), rates, None), soft_wrap=False)
    lines = captured.get().splitlines()
    assert "…" not in captured.get()
    assert max(map(len, lines)) <= 80
    assert row(lines, "decode-0")[4:] == ["9%", "1200", "0.0M", "230M", "2.0", "→", "3.5", "1000M"]


def test_workers_without_figures_have_none_and_trouble_is_told() -> None:
    lines = shown(cluster(pool(Role.COLOCATED, 2, WorkerState.DEAD, reason="no node")), Rates(), "gone")
    assert row(lines, "colocated-0") == ["colocated-0", "DEAD"]
    assert "no answer, these figures are old: gone" in lines
    assert "colocated: no node" in lines
    stuck = replace(worker(Role.DECODE, WorkerState.READY), quarantines=(Quarantine(9, 4, 5000),))
    assert any("4 KV blocks have waited 5 s" in line for line in shown(of(stuck), Rates()))


class _OverError(Exception):
    """There is no further look."""


class _Away:
    """A client whose cluster is away for a while: each look takes a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *looks: Cluster | None) -> None:
        self._looks = iter(looks)
        self.now = 0.0
        clock = SimpleNamespace(monotonic=lambda: self.now, strftime=time.strftime)
        monkeypatch.setattr(top, "time", clock)

    def client(self) -> _Away:
        return self

    async def __aenter__(self) -> _Away:
        return self

    async def __aexit__(self, *ending: object) -> None: ...

    async def get_cluster(self, timeout: float) -> Cluster:
        self.now += 1.0
        for look in self._looks:
            if look is None:
                raise Unavailable("away")
            return look
        raise _OverError


def test_rates_over_an_absence_are_those_of_the_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """30 tokens a second, and no answer for 20 seconds."""
    looks = [of(counted(Role.DECODE, "d", 30 * second)) for second in range(30)]
    shown_rates: list[float] = []

    def note(seen: Cluster, rates: Rates, trouble: str | None) -> Group:
        told = rates.of(seen.pools[0].workers[0])
        if told is not None:
            shown_rates.append(told.decoded)
        return screen(seen, rates, trouble)

    monkeypatch.setattr(top, "screen", note)
    away = _Away(monkeypatch, *looks[:5], *[None] * 20, *looks[25:])
    with out.capture(), pytest.raises(_OverError):
        asyncio.run(top._watch(cast(Target, away), 0.0))
    assert len(shown_rates) == 29
    assert shown_rates == pytest.approx([30.0] * 29)


@pytest.mark.parametrize(
    ("is_tty", "environment", "is_watched"),
    [
        (True, {"TERM": "xterm"}, True),
        (True, {"TERM": "dumb"}, False),
        (False, {"TERM": "xterm", "FORCE_COLOR": "1"}, False),
    ],
)
def test_it_is_drawn_again_and_again_only_where_that_can_be_seen(
    monkeypatch: pytest.MonkeyPatch, is_tty: bool, environment: dict[str, str], is_watched: bool
) -> None:
    called: list[str] = []

    async def look_once(target: Target) -> str:
        called.append("once")
        return ""

    async def watch(target: Target, interval: float) -> None:
        called.append("watched")

    monkeypatch.setattr(top, "look_once", look_once)
    monkeypatch.setattr(top, "_watch", watch)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_tty)
    for name in ("TERM", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    top.top(address="127.0.0.1:9", interval=1.0, once=False)
    assert called == ["watched" if is_watched else "once"]
