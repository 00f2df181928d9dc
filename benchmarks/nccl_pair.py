"""Whether KV really goes from one GPU to another by NCCL here: `python benchmarks/nccl_pair.py`, two GPUs.

Two processes, a pool on each GPU, the transport that workers use. It checks every byte, and that a sender
that is killed leaves nothing behind, and prints GB/s. Until somebody has run it, that path is unverified.
"""

from __future__ import annotations

import os

os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # before torch is imported, as in a worker
os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"

import multiprocessing
import sys
import time
from multiprocessing.connection import Connection

import torch

from engine.kv_pool import KVPool
from engine.request import NewToken
from engine.reservations import BlockReservation
from kv_transfer.blocks import pool_blocks
from kv_transfer.frame import TransferKey
from kv_transfer.layout import KVLayout
from kv_transfer.receiver import Receiver
from kv_transfer.reservation import Reservation
from kv_transfer.reservation_table import ReservationTable
from kv_transfer.sender import Sender
from kv_transfer.transfer import PushTarget
from kv_transfer.transport.collective import CollectiveTransport
from kv_transfer.transport.collective_server import CollectiveStreams
from kv_transfer.transport.grpc import GrpcPushServer, GrpcTransport
from kv_transfer.ways import Way
from pdserve.v1.errors import PdserveError
from trust.trust import Trust

LAYOUT = KVLayout(32, 8, 128, 16, "bfloat16", "nccl-pair")  # 2 MiB a block, as of an 8B model
NUM_BLOCKS, NUM_TRANSFERS, INSTANCE = 256, 8, "decode"
FIRST = NewToken(0, 1, None)
LIMIT_S = 60.0


class Silent:
    """Of the events of a reservation table only failures are told."""

    def on_ready(self, reservation: Reservation) -> None: ...

    def on_failed(self, reservation: Reservation, error: PdserveError) -> None:
        print(f"as it should be, {reservation.key} failed: {error.message}")

    def on_quarantined(self, reservation: Reservation) -> None: ...

    def on_freed(self, reservation: Reservation) -> None: ...


def prefill(orders: Connection, address: str, trust: Trust) -> None:
    pool = KVPool(LAYOUT, NUM_BLOCKS, torch.device("cuda:0"))
    torch.manual_seed(1)
    pool.tensor.copy_(torch.randn(pool.tensor.shape, dtype=torch.bfloat16))
    torch.cuda.synchronize()
    wire = GrpcTransport(trust, LAYOUT.block_bytes)
    sender = Sender(
        LAYOUT, blocks := pool_blocks(pool), {"collective": CollectiveTransport(blocks, wire, timeout_s=60.0)}
    )
    block_ids = tuple(range(NUM_BLOCKS))
    for name in iter(orders.recv, None):
        target = PushTarget(
            TransferKey(name, 0), INSTANCE, (Way("collective", address),), 0, NUM_BLOCKS, LIMIT_S
        )
        began = time.perf_counter()
        transfer = sender.open(target)
        transfer.commit(block_ids, NUM_BLOCKS * LAYOUT.block_size, FIRST)
        if name == "killed":
            os._exit(9)
        transfer.done.result(LIMIT_S)
        orders.send(time.perf_counter() - began)
    sender.close()


def main() -> int:
    if torch.cuda.device_count() < 2:
        print(f"two GPUs are needed, and torch finds {torch.cuda.device_count()}")
        return 1
    device = torch.device("cuda:1")
    torch.cuda.set_device(device)
    pool = KVPool(LAYOUT, NUM_BLOCKS, device)
    blocks = pool_blocks(pool)
    table = ReservationTable(Silent(), LAYOUT)
    receiver = Receiver(INSTANCE, LAYOUT, blocks, table)
    streams = CollectiveStreams(receiver, blocks, "127.0.0.1")
    trust = Trust.fresh()
    server = GrpcPushServer(receiver, trust, "127.0.0.1", 0, LAYOUT.block_bytes, kinds=[streams])
    server.start()
    context = multiprocessing.get_context("spawn")
    orders, theirs = context.Pipe()
    process = context.Process(target=prefill, args=(theirs, server.address, trust), daemon=True)
    process.start()
    theirs.close()  # held by the other process alone, its end is heard here
    num_bytes = NUM_BLOCKS * LAYOUT.block_bytes
    torch.manual_seed(1)
    wanted = torch.randn(pool.tensor.shape, dtype=torch.bfloat16)
    for number in range(NUM_TRANSFERS):
        key = reserve(table, f"t{number}")
        orders.send(key.transfer_id)
        try:
            seconds = orders.recv()
        except (EOFError, ConnectionResetError):
            print(f"transfer {number}: FAILED, the sending process has ended")
            return 1
        if table.consume(key) is None or not torch.equal(pool.tensor.cpu(), wanted):
            print(f"transfer {number}: WRONG BYTES")
            return 1
        print(f"transfer {number}: right, {num_bytes / seconds / 1e9:.1f} GB/s")
        pool.tensor.zero_()
        torch.cuda.synchronize()
    reserve(table, "killed")
    orders.send("killed")
    process.join()
    server.stop()  # returns only when nobody waits for bytes any more
    if table.num_reservations:
        print("the killed sender's reservation is still held")
        return 1
    print("the pair of a killed sender was torn down; NCCL works here")
    return 0


def reserve(table: ReservationTable, name: str) -> TransferKey:
    key = TransferKey(name, 0)
    table.add(key, BlockReservation(0, tuple(range(NUM_BLOCKS)), 0, 0, True), LIMIT_S)
    return key


if __name__ == "__main__":
    sys.exit(main())
