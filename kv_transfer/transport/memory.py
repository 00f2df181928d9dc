"""Frames by way of memory, in one process, with everything that can go wrong at hand: for tests.

Frames are encoded and decoded as on a wire. Where the listener shows its blocks, connections are remote
writers: they put the bytes there themselves, and only then queue the frame. With `reads_late` payloads are
read when they are delivered.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kv_transfer.blocks import BlockStore, Cells
from kv_transfer.codec import FrameError, encode
from kv_transfer.frame import Header
from kv_transfer.transport.base import Connection, ConnectionEvents, FrameSink, InboundStream
from kv_transfer.ways import Way
from pdserve.v1.errors import Unavailable


@dataclass(frozen=True)
class Faults:
    """What happens to the frames of a connection, numbered from 0 in the order of sending."""

    # Seconds before frame k is delivered.
    delay_s: Callable[[int], float] = lambda _: 0.0
    # Frame k, and with it all behind it, waits until the event is set.
    hold: Mapping[int, threading.Event] = field(default_factory=dict)
    drop: frozenset[int] = frozenset()
    duplicate: frozenset[int] = frozenset()
    # Of these frames one bit of the last byte is flipped.
    corrupt: frozenset[int] = frozenset()
    # The connection dies instead of delivering this frame.
    kill_at: int | None = None


class MemoryTransport:
    """Connects to the sinks that `listen` was called with. One object serves both sides."""

    name = "memory"

    def __init__(self, faults: Faults | None = None, name: str = "memory", reads_late: bool = False) -> None:
        self.name = name
        self._reads_late = reads_late
        self.faults = faults or Faults()
        self._sinks: dict[str, tuple[FrameSink, BlockStore | None]] = {}
        self._connections: list[tuple[str, MemoryConnection]] = []

    def listen(self, address: str, sink: FrameSink, blocks: BlockStore | None = None) -> None:
        self._sinks[address] = sink, blocks

    def close(self, address: str) -> None:
        self._sinks.pop(address, None)
        for connection in [c for to, c in self._connections if to == address]:
            connection.break_off()

    def connect(self, way: Way, events: ConnectionEvents) -> Connection:
        listener = self._sinks.get(way.address)
        if listener is None:
            raise Unavailable(f"nobody listens at {way.address}", reason="KV_CONNECT")
        connection = MemoryConnection(self.name, *listener, events, self.faults, self._reads_late)
        self._connections.append((way.address, connection))
        return connection


class MemoryEndpoint:
    """D's side."""

    def __init__(self, transport: MemoryTransport, address: str, sink: FrameSink) -> None:
        self.ways = (Way(transport.name, address),)
        self._address = address
        self._transport = transport
        self._sink = sink

    def start(self) -> None:
        self._transport.listen(self._address, self._sink)

    def stop(self) -> None:
        self._transport.close(self._address)


class MemoryConnection:
    def __init__(
        self,
        transport: str,
        sink: FrameSink,
        blocks: BlockStore | None,
        events: ConnectionEvents,
        faults: Faults,
        reads_late: bool,
    ) -> None:
        self.reads_until_answered = reads_late
        self._sink = sink
        self._blocks = blocks
        self._events = events
        self._faults = faults
        self._stream = InboundStream("memory", transport, is_remote_writer=blocks is not None)
        self.usual_verify = self._stream.usual_verify
        self._wake = threading.Condition()
        self._frames: deque[bytes | tuple[Header, list[memoryview]]] = deque()
        self._is_closed = False
        self._is_broken = False
        self._thread = threading.Thread(target=self._deliver_all, name="kv-memory", daemon=True)
        self._thread.start()

    @property
    def is_remote_writer(self) -> bool:
        return self._blocks is not None

    def send(self, header: Header, payload: Cells | None = None, target: Sequence[int] = ()) -> None:
        pieces = [] if payload is None else payload.pieces
        if self._blocks is not None and payload is not None:
            self._blocks.write(target, payload.layers, memoryview(b"".join(pieces)))
            pieces = []
        with self._wake:
            if self._is_closed:
                raise Unavailable("the connection is closed", reason="KV_STREAM_BROKEN")
            self._frames.append((header, pieces) if self.reads_until_answered else encode(header, pieces))
            self._wake.notify_all()

    def close(self) -> None:
        with self._wake:
            self._is_closed = True
            self._wake.notify_all()
        for event in self._faults.hold.values():
            event.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def break_off(self) -> None:
        """As if the receiving process went away. Returns when it is handed nothing any more."""
        with self._wake:
            self._is_broken = True
            self._wake.notify_all()
        for event in self._faults.hold.values():
            event.set()
        self._thread.join()

    def _deliver_all(self) -> None:
        number = 0
        error: Unavailable | None = None
        try:
            while (frame := self._next()) is not None:
                self._deliver(number, frame)
                number += 1
        except (Unavailable, FrameError) as broken:
            error = Unavailable(str(broken), reason="KV_STREAM_BROKEN")
        with self._wake:
            was_closed, self._is_closed = self._is_closed, True
        self._sink.disconnect(self._stream)
        if error is not None and not was_closed:
            self._events.on_lost(error)

    def _next(self) -> bytes | tuple[Header, list[memoryview]] | None:
        with self._wake:
            self._wake.wait_for(lambda: self._frames or self._is_closed or self._is_broken)
            if self._is_broken:
                raise Unavailable("the receiver is gone")
            return self._frames.popleft() if self._frames else None

    def _deliver(self, number: int, frame: bytes | tuple[Header, list[memoryview]]) -> None:
        faults = self._faults
        if number in faults.hold:
            faults.hold[number].wait()
        if delay_s := faults.delay_s(number):
            threading.Event().wait(delay_s)
        if number == faults.kill_at:
            raise Unavailable(f"killed at frame {number}")
        if number in faults.drop:
            return
        raw = frame if isinstance(frame, bytes) else encode(*frame)
        if number in faults.corrupt:
            raw = raw[:-1] + bytes([raw[-1] ^ 1])
        for _ in range(2 if number in faults.duplicate else 1):
            reply = self._sink.accept(self._stream, raw)
            if reply is not None:
                self._events.on_reply(reply)
