"""A decode worker's process is killed or stopped in the middle of a collective hand-over: what the prefill
worker's end does, and what of the pair is left there."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kv_transfer.blocks import BufferBlocks
from kv_transfer.frame import TransferKey
from kv_transfer.send_queue import SenderConfig
from kv_transfer.sender import Sender
from kv_transfer.transfer import PushTarget, Transfer
from kv_transfer.transport.collective import CollectiveTransport
from kv_transfer.transport.grpc import GrpcTransport
from kv_transfer.ways import Way
from pdserve.v1.errors import Unavailable
from tests.integrity import wait_until
from tests.trusted import TRUST
from tests.unit.kv_transfer.hand_over import FIRST, INSTANCE, WAIT_S
from tests.unit.kv_transfer.pair_process import LAYOUT, NUM_BLOCKS
from tests.unit.kv_transfer.test_collective import listening, pair_threads

ROOT = Path(__file__).parents[3]
ACK_S = 1.0


class Prefill:
    """P's end, and a process that is D's."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.unit.kv_transfer.decode_process"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        address = self.answer()
        source = BufferBlocks(NUM_BLOCKS, LAYOUT)
        wire = GrpcTransport(TRUST, LAYOUT.block_bytes, connect_timeout_s=1.0)
        transports = {"collective": CollectiveTransport(source, wire, timeout_s=1.0), "grpc": wire}
        self.sender = Sender(LAYOUT, source, transports, SenderConfig(ack_timeout_s=ACK_S))
        self.ways = (Way("collective", address), Way("grpc", address))

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def order(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        assert self.answer() == "done"

    def begin(self, name: str) -> Transfer:
        transfer = self.sender.open(
            PushTarget(TransferKey(name, 0), INSTANCE, self.ways, 0, NUM_BLOCKS, 30.0)
        )
        transfer.commit((0, 1), NUM_BLOCKS * LAYOUT.block_size, FIRST)
        return transfer

    def ship(self, name: str) -> str:
        self.order(name)
        self.begin(name).done.result(WAIT_S)
        return self.sender.routes()[INSTANCE]

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.sender.close()


@pytest.fixture
def prefill() -> Iterator[Prefill]:
    made = Prefill()
    yield made
    made.close()


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_receiver_lost_in_the_middle_costs_its_transfer_and_leaves_nothing_of_the_pair(
    prefill: Prefill, blow: signal.Signals
) -> None:
    before, num_ports = pair_threads(), listening()
    assert prefill.ship("a") == "collective"
    assert pair_threads() != before
    prefill.order("b")
    prefill.order("hold")
    transfer = prefill.begin("b")
    assert prefill.answer() == "half"
    prefill.process.send_signal(blow)
    began = time.monotonic()
    with pytest.raises(Unavailable):
        transfer.done.result(WAIT_S)
    assert time.monotonic() - began < ACK_S + 4.0
    assert wait_until(lambda: prefill.sender.num_transfers == 0)
    assert wait_until(lambda: pair_threads() == before and listening() == num_ports)
    # Another attempt at a process that says nothing ends in bounded time too, and leaves as little.
    with pytest.raises(Unavailable):
        prefill.begin("c").done.result(WAIT_S)
    assert wait_until(lambda: pair_threads() == before and listening() == num_ports)
    if blow is signal.SIGSTOP:
        prefill.process.send_signal(signal.SIGCONT)
        prefill.order("go")
        assert prefill.ship("d") in ("collective", "grpc")
