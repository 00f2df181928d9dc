"""An asyncio loop keeps its beat while KV comes into the same process on other threads."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest

from engine.reservations import BlockReservation
from kv_transfer.frame import TransferKey
from kv_transfer.layout import KVLayout
from tests.unit.kv_transfer.hand_over import HandOver

ROOT = Path(__file__).parents[2]
LAYOUT = KVLayout(30, 3, 64, 16, "bfloat16", "any")
NUM_BLOCKS = 180  # 66 MB a transfer; eight are half a gigabyte
BEAT_S = 0.02  # 50 tokens a second
# A beat may be late by a few switches of threads, not by a transfer (66 MB take 40 ms or more).
LATE_S = 0.03


async def beat_while_kv_comes(transport: str, num_transfers: int) -> list[float]:
    """By how much each beat was late during which KV came."""
    with HandOver(transport, LAYOUT, NUM_BLOCKS) as both:
        keys = [TransferKey(f"t{number}", 0) for number in range(num_transfers)]
        for number, key in enumerate(keys):
            blocks = BlockReservation(number, tuple(range(NUM_BLOCKS)), 0, 0, True)
            both.table.add(key, blocks, 60.0)
        (way,) = both.ways
        numbers = (str(num_transfers), str(NUM_BLOCKS))
        arguments = (transport, way.address, (way.nonce or b"").hex(), *numbers)
        command = ("-m", "tests.faults.push_process", *arguments)
        pusher = await asyncio.create_subprocess_exec(sys.executable, *command, cwd=ROOT)
        late: list[float] = []
        expected = num_transfers * NUM_BLOCKS * LAYOUT.block_bytes
        while both.table.bytes_received < expected and pusher.returncode is None:
            began, before = time.monotonic(), both.table.bytes_received
            await asyncio.sleep(BEAT_S)
            if both.table.bytes_received > before:
                late.append(time.monotonic() - began - BEAT_S)
        assert await pusher.wait() == 0
        assert all(both.table.consume(key) is not None for key in keys)
        await asyncio.to_thread(both.stop_listening)
    return late


@pytest.mark.parametrize(
    ("transport", "num_transfers"),
    [
        ("grpc", 2),
        pytest.param("grpc", 8, marks=pytest.mark.full),
        pytest.param("shm", 24, marks=pytest.mark.full),
        pytest.param("collective", 8, marks=pytest.mark.full),
    ],
)
async def test_fifty_tokens_a_second_go_on_while_kv_arrives(transport: str, num_transfers: int) -> None:
    late = await beat_while_kv_comes(transport, num_transfers)
    assert len(late) > 5
    assert sorted(late)[int(0.9 * len(late))] < LATE_S, sorted(late)[-5:]
