"""Two ends of a hand-over without engines: what the tests of this folder build on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.kv_pool import KVPool
from engine.request import NewToken
from engine.reservations import BlockReservation
from kv_transfer.blocks import BlockStore, BufferBlocks, Cells, DeviceBlocks, HostBlocks
from kv_transfer.frame import Header, TransferKey
from kv_transfer.layout import KVLayout
from kv_transfer.receiver import Receiver
from kv_transfer.reservation import Reservation
from kv_transfer.reservation_table import ReservationTable
from kv_transfer.send_queue import SenderConfig
from kv_transfer.sender import Sender
from kv_transfer.shared_pool import SharedPool
from kv_transfer.transfer import PushTarget, Transfer
from kv_transfer.transport.base import Connection, ConnectionEvents, PushEndpoint, Transport
from kv_transfer.transport.collective import CollectiveTransport
from kv_transfer.transport.collective_server import CollectiveStreams
from kv_transfer.transport.grpc import GrpcPushServer, GrpcTransport
from kv_transfer.transport.memory import MemoryTransport
from kv_transfer.transport.shm import ShmTransport
from kv_transfer.transport.shm_server import ShmPushServer
from kv_transfer.verify import Verify
from kv_transfer.ways import Way
from pdserve.v1.errors import PdserveError
from tests.trusted import TRUST

LAYOUT = KVLayout(2, 2, 8, 4, "float32", "tiny")
FIRST = NewToken(position=0, token_id=7, logprobs=None)
INSTANCE = "decode-instance"
WAIT_S = 10.0


class Medium(NamedTuple):
    """A transport's name, and where both pools are."""

    transport: str
    device: str = "cpu"


class DeviceBuffer(DeviceBlocks):
    """A pool on a GPU, with a copy of its blocks at hand as `array`."""

    def __init__(self, array: npt.NDArray[np.uint8], layout: KVLayout) -> None:
        super().__init__(KVPool(layout, len(array), torch.device("cuda")))
        self.write(range(len(array)), range(layout.num_layers), memoryview(array.reshape(-1)))

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """[num_blocks, block_bytes]."""
        num_blocks = len(self._pool.tensor)
        return self._pool.tensor.view(torch.uint8).reshape(num_blocks, -1).cpu().numpy()


class Events:
    """Records what a table tells its owner, and lets a test wait for it."""

    def __init__(self) -> None:
        self.log: list[tuple[str, TransferKey]] = []
        self.errors: dict[TransferKey, PdserveError] = {}
        self._changed = threading.Condition()

    def _record(self, what: str, reservation: Reservation) -> None:
        with self._changed:
            self.log.append((what, reservation.key))
            self._changed.notify_all()

    def on_ready(self, reservation: Reservation) -> None:
        self._record("ready", reservation)

    def on_failed(self, reservation: Reservation, error: PdserveError) -> None:
        self.errors[reservation.key] = error
        self._record("failed", reservation)

    def on_quarantined(self, reservation: Reservation) -> None:
        self._record("quarantined", reservation)

    def on_freed(self, reservation: Reservation) -> None:
        self._record("freed", reservation)

    def wait_for(self, what: str, key: TransferKey) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: (what, key) in self.log, WAIT_S), self.log

    def of(self, key: TransferKey) -> list[str]:
        return [what for what, other in self.log if other == key]


class HandOver:
    """One P and one D over a transport; the source blocks hold random bytes, D's hold zeros."""

    def __init__(
        self,
        transport: Transport | Medium | str,
        layout: KVLayout = LAYOUT,
        num_blocks: int = 32,
        config: SenderConfig | None = None,
        is_remote_writer: bool = False,
        verify: Verify | None = None,
        meddle: Meddle | None = None,
        spare: Transport | None = None,
    ) -> None:
        """`transport`: one, or the name of one. `is_remote_writer`: P writes D's blocks by itself (the memory
        transport only). `meddle` stands between the sender and its connections. `spare`: of the way that D
        offers after it.
        """
        size = layout.block_bytes
        self.layout = layout
        self.events = Events()
        self.table = ReservationTable(self.events, layout)
        self.source: HostBlocks | DeviceBuffer = BufferBlocks(num_blocks, layout)
        self.target: HostBlocks | DeviceBuffer = BufferBlocks(num_blocks, layout)
        self.source.array[:] = np.random.default_rng(1).integers(0, 256, self.source.array.shape, np.uint8)
        if isinstance(transport, Medium):
            transport, device = transport
            if device == "cuda":
                self.source = DeviceBuffer(self.source.array, layout)
                self.target = DeviceBuffer(self.target.array, layout)
        if isinstance(transport, str):
            transport = make_transport(transport, self.source, layout)
        pool: SharedPool | None = None
        if isinstance(transport, ShmTransport):
            pool = SharedPool(num_blocks * size)
            self.target = HostBlocks(layout, pool.tensor.view(num_blocks, size).numpy())
        self.receiver = Receiver(INSTANCE, layout, self.target, self.table, verify=verify)
        self._stop_listening: Callable[[], None] = lambda: None
        self._cleanup = ExitStack()
        if isinstance(transport, MemoryTransport):
            self.ways: tuple[Way, ...] = (Way(transport.name, "decode"),)
            transport.listen("decode", self.receiver, self.target if is_remote_writer else None)
            self._stop_listening = partial(transport.close, "decode")
        else:
            names = [each.name for each in (transport, spare) if each is not None]
            server = self._server(transport, pool)
            server.start()
            self.ways = tuple(way for way in server.ways if way.transport in names)
            self._stop_listening = server.stop
            self._cleanup.callback(self.stop_listening)
        self.address = self.ways[0].address
        used = Meddling(transport, meddle) if meddle is not None else transport
        transports: dict[str, Transport] = {transport.name: used}
        if spare is not None:
            transports[spare.name] = spare
        self.sender = Sender(layout, self.source, transports, config)
        self._cleanup.callback(self.sender.close)

    def _server(self, transport: Transport, pool: SharedPool | None) -> PushEndpoint:
        if pool is not None:
            return ShmPushServer(self.receiver, pool, len(self.target.array))
        is_collective = isinstance(transport, CollectiveTransport)
        kinds = [CollectiveStreams(self.receiver, self.target, "127.0.0.1")] if is_collective else []
        return GrpcPushServer(self.receiver, TRUST, "127.0.0.1", 0, self.layout.block_bytes, kinds=kinds)

    def reserve(
        self,
        name: str,
        block_ids: tuple[int, ...],
        num_cached: int = 0,
        epoch: int = 0,
        lease_s: float = 10.0,
        instance_id: str = INSTANCE,
    ) -> PushTarget:
        key = TransferKey(name, epoch)
        blocks = BlockReservation(len(self.events.log), block_ids, num_cached, 0, True)
        self.table.add(key, blocks, lease_s)
        return PushTarget(key, instance_id, self.ways, num_cached, len(block_ids), lease_s)

    def send_all(
        self, target: PushTarget, source_ids: tuple[int, ...], num_tokens: int | None = None
    ) -> Transfer:
        transfer = self.sender.open(target)
        transfer.commit(source_ids, num_tokens or len(source_ids) * self.layout.block_size, FIRST)
        return transfer

    def stop_listening(self) -> None:
        """As D does when it stops; idempotent."""
        stop, self._stop_listening = self._stop_listening, lambda: None
        stop()

    def __enter__(self) -> HandOver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._cleanup.close()
        self.table.check_integrity()
        assert self.table.num_reservations == 0
        assert self.sender.num_transfers == 0


def make_transport(name: str, source: BlockStore | None = None, layout: KVLayout = LAYOUT) -> Transport:
    """`source`: what is sent; the collective transport wants to know it."""
    if name == "shm":
        return ShmTransport(layout)
    if name in ("memory", "late reader"):
        return MemoryTransport(reads_late=name == "late reader")
    wire = GrpcTransport(TRUST, layout.block_bytes)
    return wire if source is None or name == wire.name else CollectiveTransport(source, wire)


Send = Callable[[Header, Cells | None, Sequence[int]], None]


class Meddle(Protocol):
    """Between a sender and its connection: passes a frame on by `send`, or does something else. Frames are
    numbered from 0 over all connections."""

    def __call__(
        self, send: Send, number: int, header: Header, payload: Cells | None, target: Sequence[int]
    ) -> None: ...


class Meddling:
    """Any transport, with somebody at the sender's end who meddles with its frames."""

    def __init__(self, inner: Transport, meddle: Meddle) -> None:
        self.name = inner.name
        self._inner = inner
        self._meddle = meddle
        self._numbers = count()

    def connect(self, way: Way, events: ConnectionEvents) -> Connection:
        return Meddled(self._inner.connect(way, events), self._meddle, self._numbers)


class Meddled:
    def __init__(self, inner: Connection, meddle: Meddle, numbers: Iterator[int]) -> None:
        self.is_remote_writer = inner.is_remote_writer
        self.reads_until_answered = inner.reads_until_answered
        self.usual_verify = inner.usual_verify
        self._inner = inner
        self._meddle = meddle
        self._numbers = numbers

    def send(self, header: Header, payload: Cells | None = None, target: Sequence[int] = ()) -> None:
        self._meddle(self._inner.send, next(self._numbers), header, payload, target)

    def close(self) -> None:
        self._inner.close()
