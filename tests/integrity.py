"""After every test: what it took from engines, reservations and transfers is back.

`tests/conftest.py` imports the fixture. Every EngineLoop, ReservationTable and Sender that is alive is
looked at, whoever made it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TypeVar
from weakref import WeakSet

import pytest

from engine.engine import Engine
from engine.errors import EngineError
from engine.loop import EngineLoop
from engine.request import EngineLoad
from kv_transfer.reservation_table import ReservationTable
from kv_transfer.sender import Sender

T = TypeVar("T")
# What was cancelled at the very end of a test is given back by other threads, a moment later.
SETTLE_S = 5.0


def _watch(kind: type[T]) -> WeakSet[T]:
    """Every living object of a class, from now on."""
    living: WeakSet[T] = WeakSet()
    construct = kind.__init__

    def constructed(self: T, *args: object, **kwargs: object) -> None:
        construct(self, *args, **kwargs)
        living.add(self)

    kind.__init__ = constructed  # type: ignore[assignment,method-assign]
    return living


_loops = _watch(EngineLoop)
_tables = _watch(ReservationTable)
_senders = _watch(Sender)


def _in_words(load: EngineLoad) -> str:
    counts = {
        "running": load.num_running,
        "waiting": load.num_waiting,
        "reservations": load.num_reservations,
        "blocks reserved": load.blocks_reserved,
        "blocks quarantined": load.blocks_quarantined,
        "blocks not free": load.blocks_total - load.blocks_free,
    }
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)


def held(engine: Engine) -> str:
    """What an engine still holds, in words; empty if nothing. On the engine's thread."""
    engine.check_integrity()
    return _in_words(engine.snapshot())


def leaks() -> list[str]:
    found: list[str] = []
    for loop in list(_loops):
        try:
            words = loop.call(held).result(timeout=SETTLE_S)
        except EngineError:  # closed: its thread is gone, and what it was running is nobody's any more
            loop.engine.check_integrity()
        except FutureTimeoutError:
            pass  # never started
        else:
            found += [f"engine: {words}"] if words else []
    for table in list(_tables):
        table.check_integrity()
        found += [f"{table.num_reservations} reservations"] if table.num_reservations else []
    for sender in list(_senders):
        sender.check_integrity()
        found += [f"{sender.num_transfers} transfers"] if sender.num_transfers else []
    return found


def wait_until(is_true: Callable[[], bool], timeout_s: float = SETTLE_S) -> bool:
    """For what other threads bring about: looks again every few milliseconds."""
    pause, deadline = threading.Event(), time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline:
            return False
        pause.wait(0.005)
    return True


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    yield
    wait_until(lambda: not leaks())
    assert leaks() == []
