"""Both ends of a hand-over as workers have them, but without engines: pools, and what lies between them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.kv_pool import allocate_memory
from engine.reservations import BlockReservation
from kv_transfer.blocks import BlockStore, HostBlocks
from kv_transfer.frame import TransferKey
from kv_transfer.layout import KVLayout
from kv_transfer.receiver import Receiver
from kv_transfer.reservation import Reservation
from kv_transfer.reservation_table import ReservationTable
from kv_transfer.shared_pool import SharedPool
from kv_transfer.transport.base import PushEndpoint, Transport
from kv_transfer.transport.collective import CollectiveTransport
from kv_transfer.transport.collective_server import CollectiveStreams
from kv_transfer.transport.grpc import GrpcPushServer, GrpcTransport
from kv_transfer.transport.shm import ShmTransport
from kv_transfer.transport.shm_server import ShmPushServer
from kv_transfer.verify import Verify
from kv_transfer.ways import Way
from pdserve.v1.errors import PdserveError
from trust.trust import Trust

TRANSPORTS = ("shm", "collective", "grpc")
INSTANCE = "bench"
LEASE_S = 60.0
_HOST = "127.0.0.1"


def plain_blocks(num_blocks: int, layout: KVLayout) -> HostBlocks:
    """A pool as an engine takes it."""
    return _blocks(layout, allocate_memory(num_blocks * layout.block_bytes, torch.device("cpu")))


def _blocks(layout: KVLayout, memory: torch.Tensor) -> HostBlocks:
    return HostBlocks(layout, memory.view(-1, layout.block_bytes).numpy())


def sending_transport(name: str, trust: Trust, blocks: BlockStore) -> Transport:
    """P's end."""
    layout = blocks.layout
    if name == ShmTransport.name:
        return ShmTransport(layout)
    wire = GrpcTransport(trust, layout.block_bytes)
    return wire if name == wire.name else CollectiveTransport(blocks, wire)


class ReceivingEnd:
    """D's end, with a pool that is shared where the transport wants it. It checks nothing: what carries bytes
    bare does not either, and both are compared."""

    def __init__(self, transport: str, trust: Trust, layout: KVLayout, num_blocks: int) -> None:
        """Raises OSError or RuntimeError where this machine has not what it takes."""
        self._num_blocks = num_blocks
        self._num_added = 0
        self.table = ReservationTable(_Nobody(), layout)
        if transport == ShmTransport.name:
            pool = SharedPool(num_blocks * layout.block_bytes)
            blocks = _blocks(layout, pool.tensor)
            receiver = Receiver(INSTANCE, layout, blocks, self.table, Verify.OFF)
            self._endpoint: PushEndpoint = ShmPushServer(receiver, pool, num_blocks)
        else:
            blocks = plain_blocks(num_blocks, layout)
            receiver = Receiver(INSTANCE, layout, blocks, self.table, Verify.OFF)
            is_collective = transport == CollectiveTransport.name
            kinds = [CollectiveStreams(receiver, blocks, _HOST)] if is_collective else []
            self._endpoint = GrpcPushServer(receiver, trust, _HOST, 0, layout.block_bytes, kinds=kinds)
        self._endpoint.start()
        ways: Mapping[str, Way] = {way.transport: way for way in self._endpoint.ways}
        self.way = ways[transport]

    def reserve(self, num_blocks: int, first_block: int) -> TransferKey:
        key = TransferKey(f"t{self._num_added}", 0)
        self._num_added += 1
        block_ids = tuple((first_block + index) % self._num_blocks for index in range(num_blocks))
        self.table.add(key, BlockReservation(self._num_added, block_ids, 0, 0, True), LEASE_S)
        return key

    def stop(self) -> None:
        self._endpoint.stop()


class _Nobody:
    """Wants to know nothing of what becomes of reservations."""

    def on_ready(self, reservation: Reservation) -> None: ...

    def on_failed(self, reservation: Reservation, error: PdserveError) -> None: ...

    def on_quarantined(self, reservation: Reservation) -> None: ...

    def on_freed(self, reservation: Reservation) -> None: ...
