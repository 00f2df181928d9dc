"""One frame of KV hangs on its way, over any transport."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import count

import pytest

from kv_transfer.blocks import Cells
from kv_transfer.frame import Header
from kv_transfer.transport.base import Connection, ConnectionEvents, Transport
from kv_transfer.transport.collective import CollectiveTransport
from kv_transfer.transport.grpc import GrpcTransport
from kv_transfer.transport.memory import MemoryTransport
from kv_transfer.transport.shm import ShmTransport
from kv_transfer.ways import Way
from tests.unit.kv_transfer.hand_over import Meddled, Send

_CLASSES: dict[str, type[Transport]] = {
    "memory": MemoryTransport,
    "grpc": GrpcTransport,
    "shm": ShmTransport,
    "collective": CollectiveTransport,
}


class HeldFrame:
    """Of the connections made from now on: the first frame with a payload waits until `gate` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, transport: str, most_s: float = 10.0) -> None:
        self.gate = threading.Event()
        self.is_held = False
        self._most_s = most_s
        kind, numbers = _CLASSES[transport], count()
        connect = kind.connect

        def connect_held(transport: Transport, way: Way, events: ConnectionEvents) -> Connection:
            return Meddled(connect(transport, way, events), self._pass, numbers)

        monkeypatch.setattr(kind, "connect", connect_held)

    def _pass(
        self, send: Send, number: int, header: Header, payload: Cells | None, target: Sequence[int]
    ) -> None:
        if payload is not None and not self.is_held:
            self.is_held = True
            self.gate.wait(self._most_s)
        send(header, payload, target)
