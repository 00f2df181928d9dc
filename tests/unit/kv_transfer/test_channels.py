"""Several connections to one decode worker: as many as there is work for, up to the setting."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kv_transfer.send_queue import SenderConfig
from kv_transfer.transport.memory import Faults, MemoryTransport
from pdserve.v1.errors import Unavailable
from tests.unit.kv_transfer.hand_over import FIRST, LAYOUT, WAIT_S, HandOver, make_transport


def num_threads() -> int:
    return sum(thread.name.startswith("kv-to-") for thread in threading.enumerate())


@pytest.mark.parametrize("transport", ["memory", "grpc"])
def test_transfers_spread_over_channels_and_arrive_whole(transport: str) -> None:
    before = num_threads()
    with HandOver(make_transport(transport), config=SenderConfig(num_channels=3)) as both:
        targets = [both.reserve(f"t{i}", (2 * i, 2 * i + 1)) for i in range(16)]
        opened = [both.sender.open(target) for target in targets]
        assert num_threads() - before == 3
        for index, transfer in enumerate(opened):
            transfer.commit((2 * index, 2 * index + 1), 2 * LAYOUT.block_size, FIRST)
        for target, transfer in zip(targets, opened, strict=True):
            transfer.done.result(WAIT_S)
            both.events.wait_for("ready", target.key)
            assert both.table.consume(target.key) is not None
        assert np.array_equal(both.target.array, both.source.array)
        assert both.sender.bytes_sent == both.table.bytes_received
        assert both.sender.counters.copy()[transport].num_transfers == 16


def test_a_channel_that_is_free_is_used_again() -> None:
    before = num_threads()
    with HandOver(MemoryTransport(), config=SenderConfig(num_channels=3)) as both:
        for number in range(4):
            target = both.reserve(f"t{number}", (number,))
            both.send_all(target, (number,)).done.result(WAIT_S)
            both.events.wait_for("ready", target.key)
            both.table.release(target.key)
        assert num_threads() - before == 1


def test_a_channel_that_breaks_fails_its_own_transfers_only() -> None:
    transport = MemoryTransport(Faults(kill_at=1))
    with HandOver(transport, config=SenderConfig(num_channels=2)) as both:
        first, second = both.reserve("a", (0,)), both.reserve("b", (1,))
        broken = both.sender.open(first)
        while not broken.is_open_sent:
            threading.Event().wait(0.001)
        transport.faults = Faults()  # for connections that are made from here on
        whole = both.sender.open(second)
        broken.commit((0,), LAYOUT.block_size, FIRST)
        with pytest.raises(Unavailable):
            broken.done.result(WAIT_S)
        whole.commit((1,), LAYOUT.block_size, FIRST)
        whole.done.result(WAIT_S)
        both.events.wait_for("ready", second.key)
        both.table.release(first.key)
        both.table.release(second.key)
