"""Pairs of two processes: who dies or stops when, and what is left. What any transport must do is tested by
the conformance suite."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engine.reservations import BlockReservation
from kv_transfer.blocks import BufferBlocks
from kv_transfer.frame import TransferKey
from kv_transfer.receiver import Receiver
from kv_transfer.reservation_table import ReservationTable
from kv_transfer.send_queue import SenderConfig
from kv_transfer.transport.collective import CollectiveTransport
from kv_transfer.transport.collective_server import CollectiveStreams
from kv_transfer.transport.grpc import GrpcPushServer, GrpcTransport
from kv_transfer.transport.inbound_pair import InboundPair, PairTimeouts
from kv_transfer.ways import Way, WayUnusable
from pdserve.v1.errors import Aborted, Unavailable
from tests.integrity import wait_until
from tests.trusted import TRUST
from tests.unit.kv_transfer.hand_over import INSTANCE, LAYOUT, WAIT_S, Events, HandOver
from tests.unit.kv_transfer.pair_process import LAYOUT as LARGE
from tests.unit.kv_transfer.pair_process import NUM_BLOCKS

ROOT = Path(__file__).parents[3]


def pair_threads() -> list[str]:
    """Of Gloo, of the store and of ours, in this process."""
    ours = [each.name for each in threading.enumerate() if each.name.startswith(("kv-a", "kv-to"))]
    tasks = Path("/proc/self/task").glob("*/comm")
    names = [task.read_text().strip() for task in tasks if task.exists()]
    return ours + [name for name in names if name.startswith(("gloo", "pt_gloo", "pt_tcpstore"))]


def listening() -> int:
    return sum(each.status == psutil.CONN_LISTEN for each in psutil.Process().net_connections("tcp"))


class Decode:
    """D's end, and a process that is P's."""

    def __init__(self, data_s: float = 1.0) -> None:
        self.events = Events()
        self.table = ReservationTable(self.events, LARGE)
        self.target = BufferBlocks(NUM_BLOCKS, LARGE)
        receiver = Receiver(INSTANCE, LARGE, self.target, self.table)
        streams = CollectiveStreams(receiver, self.target, "127.0.0.1", PairTimeouts(data_s=data_s))
        self.server = GrpcPushServer(receiver, TRUST, "127.0.0.1", 0, LARGE.block_bytes, kinds=[streams])
        self.server.start()
        command = [sys.executable, "-m", "tests.unit.kv_transfer.pair_process", self.server.address]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert self.answer() == "ready"

    def reserve(self, name: str) -> TransferKey:
        key = TransferKey(name, 0)
        self.table.add(key, BlockReservation(0, tuple(range(NUM_BLOCKS)), 0, 0, True), 10.0)
        self.target.array[:] = 0
        return key

    def order(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def signal_in_the_middle(self, number: signal.Signals) -> None:
        assert wait_until(lambda: bool(self.target.array[0, 0]))
        os.kill(self.process.pid, number)
        assert not self.target.array[-1, -1]

    def ship(self, name: str) -> str:
        key = self.reserve(name)
        self.order(name)
        way = self.answer()
        assert self.table.consume(key) is not None
        assert (self.target.array == 0xAB).all()
        return way

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.server.stop()
        self.table.check_integrity()
        assert self.table.num_reservations == 0


@pytest.fixture
def decode() -> Iterator[Decode]:
    before, num_ports = pair_threads(), listening()
    made = Decode()
    yield made
    made.close()
    assert wait_until(lambda: pair_threads() == before and listening() == num_ports)


def test_bytes_arrive_from_another_process(decode: Decode) -> None:
    assert [decode.ship(name) for name in ("a", "b")] == ["collective", "collective"]


@pytest.mark.parametrize("when", ["open", "announce"])
def test_a_sender_killed_before_its_payload_gives_the_blocks_back(decode: Decode, when: str) -> None:
    key = decode.reserve("a")
    decode.order(f"{when} a")
    if when == "open":
        decode.answer()
        decode.process.kill()
        decode.process.wait()
        decode.table.release(key)
    decode.events.wait_for("freed", key)


def test_a_sender_killed_in_the_middle_gives_the_blocks_back(decode: Decode) -> None:
    key = decode.reserve("a")
    decode.order("a")
    decode.signal_in_the_middle(signal.SIGKILL)
    decode.events.wait_for("failed", key)
    decode.events.wait_for("freed", key)


def test_a_sender_stopped_in_the_middle_is_given_up_and_goes_on_by_grpc(decode: Decode) -> None:
    key = decode.reserve("a")
    decode.order("a")
    decode.signal_in_the_middle(signal.SIGSTOP)
    decode.events.wait_for("freed", key)
    copy = decode.target.array.copy()
    os.kill(decode.process.pid, signal.SIGCONT)
    assert decode.answer() in ("WAY_BROKEN", "KV_STREAM_BROKEN")
    assert (decode.target.array == copy).all()
    assert decode.ship("b") in ("grpc", "collective")


def test_a_pair_that_breaks_leaves_the_next_transfer_to_grpc(decode: Decode) -> None:
    assert decode.ship("a") == "collective"
    (inbound,) = (each for each in threading.enumerate() if each.name == "kv-announced")
    inbound._pair.abort()  # type: ignore[attr-defined]
    key = decode.reserve("b")
    decode.order("b")
    assert decode.answer() == "WAY_BROKEN"
    decode.events.wait_for("freed", key)
    assert decode.ship("c") == "grpc"


def test_a_pair_that_broke_is_made_anew_after_a_pause() -> None:
    config, spare = SenderConfig(broken_way_pause_s=2.0), GrpcTransport(TRUST, LAYOUT.block_bytes)
    with HandOver("collective", config=config, spare=spare) as both:

        def ship(name: str) -> str:
            target = both.reserve(name, (0, 1))
            both.send_all(target, (0, 1)).done.result(WAIT_S)
            assert both.table.consume(target.key) is not None
            return both.sender.routes()[INSTANCE]

        assert ship("a") == "collective"
        (inbound,) = (each for each in threading.enumerate() if each.name == "kv-announced")
        inbound._pair.abort()  # type: ignore[attr-defined]
        target = both.reserve("b", (0, 1))
        with pytest.raises(Unavailable) as caught:
            both.send_all(target, (0, 1)).done.result(WAIT_S)
        assert caught.value.reason == "WAY_BROKEN"
        broke_at = time.monotonic()
        both.events.wait_for("freed", target.key)
        assert ship("c") == "grpc" or time.monotonic() > broke_at + 2.0
        assert wait_until(lambda: time.monotonic() > broke_at + 2.1)
        assert ship("d") == "collective"
        # What was used meanwhile is closed.
        assert wait_until(lambda: len(both.sender._all()) == 1)


def test_a_second_transfer_waits_its_turn_on_the_pair() -> None:
    """One pair for the two processes, whatever is to be sent."""
    with HandOver("collective", LARGE, 2 * NUM_BLOCKS) as both:
        both.source.array &= 0x3F
        targets = [both.reserve(name, (2 * n, 2 * n + 1)) for n, name in enumerate("ab")]
        transfers = [both.send_all(each, (2 * n + 1, 2 * n)) for n, each in enumerate(targets)]
        for target, transfer in zip(targets, transfers, strict=True):
            transfer.done.result(WAIT_S)
            assert both.table.consume(target.key) is not None
        assert (both.target.array == both.source.array[[1, 0, 3, 2]]).all()
        assert pair_threads().count("kv-announced") == 1


def test_an_abort_in_flight_holds_the_source_until_the_answer_and_spares_the_pair() -> None:
    with HandOver("collective") as both:
        target = both.reserve("a", (0, 1, 2))
        transfer = both.sender.open(target)
        transfer.offer((0, 1, 2), 3)
        transfer.abort(Aborted("gone"))
        with pytest.raises(Aborted):
            transfer.done.result(WAIT_S)
        both.events.wait_for("freed", target.key)
        again = both.reserve("b", (0, 1, 2))
        both.send_all(again, (0, 1, 2)).done.result(WAIT_S)
        assert both.table.consume(again.key) is not None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("where", ["write", "_buffer"])
def test_a_receiver_without_memory_gives_the_blocks_back(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Of a payload that has come, and of one that was only announced."""

    def fails(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(BufferBlocks if where == "write" else InboundPair, where, fails)
    with HandOver("collective") as both:
        target = both.reserve("a", (5, 3))
        transfer = both.send_all(target, (1, 2))
        with pytest.raises(Unavailable):
            transfer.done.result(timeout=WAIT_S)
        both.events.wait_for("freed", target.key)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_receiver_without_memory_reads_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although more is announced than it has room for, and its stream's end is slow."""
    answers = InboundPair.answers

    def fails(*_: object) -> None:
        raise RuntimeError("out of memory")

    def ends_late(inbound: InboundPair) -> Iterator[bytes]:
        yield from answers(inbound)
        time.sleep(0.5)

    monkeypatch.setattr(BufferBlocks, "write", fails)
    monkeypatch.setattr(InboundPair, "answers", ends_late)
    with HandOver("collective", config=SenderConfig(frame_bytes=LAYOUT.block_bytes)) as both:
        target = both.reserve("a", tuple(range(12)))
        transfer = both.send_all(target, tuple(range(12)))
        with pytest.raises(Unavailable):
            transfer.done.result(timeout=WAIT_S)
        both.events.wait_for("freed", target.key)
        assert wait_until(lambda: "kv-announced" not in pair_threads())


def test_an_idle_pair_sleeps() -> None:
    with HandOver("collective") as both:
        target = both.reserve("a", (0,))
        both.send_all(target, (0,)).done.result(WAIT_S)
        assert both.table.consume(target.key) is not None
        began = time.process_time()
        threading.Event().wait(1.0)
        assert time.process_time() - began < 0.05  # two ends; Gloo's threads look 100 times a second


def test_pools_of_other_layouts_make_no_pair_and_other_hosts_none_unless_trusted() -> None:
    with HandOver("collective") as both:
        wire = GrpcTransport(TRUST, LAYOUT.block_bytes)
        foreign = CollectiveTransport(BufferBlocks(1, LARGE), wire)
        with pytest.raises(WayUnusable, match="layer_bytes"):
            foreign.connect(both.ways[0], both.sender)  # type: ignore[arg-type]
        far = CollectiveTransport(both.source, wire, is_near_only=True)
        with pytest.raises(WayUnusable, match="trusted_network"):
            far.connect(Way("collective", "192.0.2.1:1"), both.sender)  # type: ignore[arg-type]
        transfer = both.send_all(target := both.reserve("a", (0,)), (0,))
        transfer.done.result(WAIT_S)
        assert both.table.consume(target.key) is not None
