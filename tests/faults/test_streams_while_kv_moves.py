"""An asyncio loop keeps its beat while KV comes into the same process on other threads."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest

from engine.reservations import BlockReservation
from kv_transfer.blocks import BufferBlocks
from kv_transfer.frame import TransferKey
from kv_transfer.layout import KVLayout
from kv_transfer.receiver import Receiver
from kv_transfer.reservation_table import ReservationTable
from kv_transfer.transport.grpc import GrpcPushServer
from tests.unit.kv_transfer.hand_over import INSTANCE, Events

ROOT = Path(__file__).parents[2]
LAYOUT = KVLayout(30, 3, 64, 16, "bfloat16", "any")
NUM_BLOCKS, NUM_TRANSFERS = 180, 8  # 66 MB each, 530 MB in all
BEAT_S = 0.02  # 50 tokens a second
# A beat may be late by a few switches of threads, not by a transfer (66 MB take 40 ms or more).
LATE_S = 0.03


@pytest.mark.full
async def test_fifty_tokens_a_second_go_on_while_half_a_gigabyte_arrives() -> None:
    events = Events()
    size = LAYOUT.block_bytes
    table = ReservationTable(events, LAYOUT)
    server = GrpcPushServer(
        Receiver(INSTANCE, LAYOUT, BufferBlocks(NUM_BLOCKS, LAYOUT), table), "127.0.0.1", 0, size
    )
    server.start()
    keys = [TransferKey(f"t{number}", 0) for number in range(NUM_TRANSFERS)]
    for number, key in enumerate(keys):
        table.add(key, BlockReservation(number, tuple(range(NUM_BLOCKS)), 0, 0, True), 60.0)
    command = ("-m", "tests.faults.push_process", server.address, str(NUM_TRANSFERS), str(NUM_BLOCKS))
    pusher = await asyncio.create_subprocess_exec(sys.executable, *command, cwd=ROOT)
    late: list[float] = []
    while table.bytes_received < NUM_TRANSFERS * NUM_BLOCKS * size and pusher.returncode is None:
        began, before = time.monotonic(), table.bytes_received
        await asyncio.sleep(BEAT_S)
        if table.bytes_received > before:
            late.append(time.monotonic() - began - BEAT_S)
    assert await pusher.wait() == 0
    assert all(table.consume(key) is not None for key in keys)
    await asyncio.to_thread(server.stop)
    assert len(late) > 5
    assert sorted(late)[int(0.9 * len(late))] < LATE_S, sorted(late)[-5:]
