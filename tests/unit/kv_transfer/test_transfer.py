"""Sender and receiver together: over every transport, and with each fault of the memory transport."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import grpc
import numpy as np
import pytest

from kv_transfer.codec import decode, encode
from kv_transfer.frame import Abort, Ack, Blocks, Commit, Open, Refused, TransferKey
from kv_transfer.layout import KVLayout, require_equal
from kv_transfer.send_queue import SenderConfig
from kv_transfer.transport.base import InboundStream, Transport
from kv_transfer.transport.grpc import PUSH, GrpcPushServer, GrpcTransport
from kv_transfer.transport.memory import Faults, MemoryTransport
from kv_transfer.verify import Digest, Verify, checksum
from kv_transfer.ways import Way
from pdserve.v1.errors import Aborted, DataLoss, FailedPrecondition, Unavailable
from tests.trusted import TRUST
from tests.unit.kv_transfer.hand_over import FIRST, INSTANCE, LAYOUT, WAIT_S, HandOver
from trust.channels import open_channel

SIZE = LAYOUT.block_bytes
ONE_BLOCK = SenderConfig(frame_bytes=SIZE, window_bytes=2 * SIZE, ack_timeout_s=10.0)
IMPATIENT = SenderConfig(frame_bytes=SIZE, window_bytes=2 * SIZE, ack_timeout_s=0.2)


@contextmanager
def hand_over(
    transport: Transport, config: SenderConfig | None = None, layout: KVLayout = LAYOUT, num_blocks: int = 32
) -> Iterator[HandOver]:
    both = HandOver(transport, layout, num_blocks, config)
    try:
        yield both
    finally:
        both.close()


def consume(both: HandOver, key: TransferKey) -> None:
    both.events.wait_for("ready", key)
    assert both.table.consume(key) is not None


def test_layouts_that_differ_are_named() -> None:
    with pytest.raises(FailedPrecondition, match="dtype: float32 here, bfloat16 there"):
        require_equal(LAYOUT, KVLayout(2, 2, 8, 4, "bfloat16", "tiny"))
    with hand_over(MemoryTransport()) as both:
        other = KVLayout(2, 2, 8, 4, "float32", "another model")
        stream = InboundStream("test", "memory")
        target = both.reserve("a", (0,))
        raw = encode(Open(target.key, INSTANCE, "memory", other, 1, 0, Verify.CHECKSUM))
        reply, _ = decode(both.receiver.accept(stream, raw) or b"")
        assert isinstance(reply, Refused)
        assert reply.reason == "LAYOUT_MISMATCH"
        both.table.release(target.key)


# -- the memory transport's faults: frame 0 is Open, then one block a frame, then Commit ----------------


@pytest.mark.parametrize("frame", [0, 1, 2, 3])
def test_a_frame_that_comes_twice_is_applied_once(frame: int) -> None:
    with hand_over(MemoryTransport(Faults(duplicate=frozenset({frame}))), ONE_BLOCK) as both:
        target = both.reserve("a", (0, 1))
        both.send_all(target, (0, 1)).done.result(WAIT_S)
        consume(both, target.key)
        assert both.table.bytes_received == 2 * SIZE
        assert np.array_equal(both.target.array[:2], both.source.array[:2])


@pytest.mark.parametrize("frame", [1, 2])
def test_damage_is_data_loss_on_both_sides(frame: int) -> None:
    with hand_over(MemoryTransport(Faults(corrupt=frozenset({frame}))), ONE_BLOCK) as both:
        target = both.reserve("a", (0, 1))
        with pytest.raises(DataLoss):
            both.send_all(target, (0, 1)).done.result(WAIT_S)
        both.events.wait_for("failed", target.key)
        assert isinstance(both.events.errors[target.key], DataLoss)
        assert "freed" in both.events.of(target.key)


@pytest.mark.parametrize("frame", [0, 1, 2, 3])
def test_a_lost_frame_fails_its_transfer_in_bounded_time(frame: int) -> None:
    with hand_over(MemoryTransport(Faults(drop=frozenset({frame}))), IMPATIENT) as both:
        target = both.reserve("a", (0, 1))
        with pytest.raises((Aborted, Unavailable)):
            both.send_all(target, (0, 1)).done.result(WAIT_S)
        both.table.release(target.key)
        both.events.wait_for("freed", target.key)


@pytest.mark.parametrize("frame", [0, 1, 2, 3])
def test_a_connection_that_dies_at_a_frame_fails_both_ends_and_the_next_one_works(frame: int) -> None:
    transport = MemoryTransport(Faults(kill_at=frame))
    with hand_over(transport, ONE_BLOCK) as both:
        target = both.reserve("a", (0, 1))
        with pytest.raises(Unavailable):
            both.send_all(target, (0, 1)).done.result(WAIT_S)
        if frame > 0:
            both.events.wait_for("failed", target.key)
        both.table.release(target.key)
        both.events.wait_for("freed", target.key)
        transport.faults = Faults()
        again = both.reserve("a", (4, 5), epoch=1)
        both.send_all(again, (0, 1)).done.result(WAIT_S)
        consume(both, again.key)


def test_a_slow_way_only_takes_longer() -> None:
    with hand_over(MemoryTransport(Faults(delay_s=lambda k: 0.01 * (k % 3))), ONE_BLOCK) as both:
        targets = [both.reserve(f"t{i}", (2 * i, 2 * i + 1)) for i in range(8)]
        transfers = [both.send_all(t, t_ids) for t, t_ids in zip(targets, [(0, 1)] * 8, strict=True)]
        for target, transfer in zip(targets, transfers, strict=True):
            transfer.done.result(WAIT_S)
            consume(both, target.key)


def test_a_late_frame_does_not_land_in_blocks_that_are_anothers_by_now() -> None:
    late = threading.Event()
    transport = MemoryTransport(Faults(hold={2: late}))
    with hand_over(transport, ONE_BLOCK) as both:
        first = both.reserve("a", (0, 1))
        transfer = both.send_all(first, (0, 1))
        wait_until(lambda: both.table.bytes_received == SIZE)
        both.table.release(first.key)
        both.events.wait_for("freed", first.key)
        transport.faults = Faults()
        second = both.reserve("b", (0, 1))
        # B's frames come on a stream of their own, as from another prefill worker.
        stream = InboundStream("another", "memory")
        push_by_hand(both, stream, second.key, (2, 3))
        late.set()
        with pytest.raises(FailedPrecondition):
            transfer.done.result(WAIT_S)
        consume(both, second.key)
        assert np.array_equal(both.target.array[:2], both.source.array[2:4])


def test_the_source_stays_pinned_while_the_sending_thread_reads_it() -> None:
    gate, inside = threading.Event(), threading.Event()
    with hand_over(MemoryTransport(), ONE_BLOCK) as both:
        read = both.source.read

        def slow_read(block_ids: Sequence[int], layers: range) -> list[memoryview]:
            inside.set()
            gate.wait(WAIT_S)
            return read(block_ids, layers)

        both.source.read = slow_read  # type: ignore[method-assign]
        target = both.reserve("a", (0, 1))
        transfer = both.send_all(target, (0, 1))
        assert inside.wait(WAIT_S)
        transfer.abort(Aborted("gone"))
        assert not transfer.done.done()
        assert both.sender.num_transfers == 1
        gate.set()
        with pytest.raises(Aborted):
            transfer.done.result(WAIT_S)
        both.events.wait_for("freed", target.key)


def test_the_source_stays_pinned_until_a_connection_that_reads_late_is_answered() -> None:
    late = threading.Event()
    transport = MemoryTransport(Faults(hold={2: late}), reads_late=True)
    with hand_over(transport, ONE_BLOCK) as both:
        target = both.reserve("a", (0, 1, 2))
        transfer = both.sender.open(target)
        transfer.offer((0, 1, 2), 3)
        wait_until(lambda: both.sender.bytes_sent == 3 * SIZE)  # one is there, two are on their way
        transfer.abort(Aborted("gone"))
        assert not transfer.done.done()
        assert both.sender.num_transfers == 1
        late.set()
        with pytest.raises(Aborted):
            transfer.done.result(WAIT_S)
        assert both.sender.num_transfers == 0
        both.events.wait_for("freed", target.key)


@pytest.mark.parametrize("ends_by", ["close", "silence"])
def test_a_late_reader_that_is_closed_or_silent_lets_go_of_the_source(ends_by: str) -> None:
    late = threading.Event()
    transport = MemoryTransport(Faults(hold={1: late}), reads_late=True)
    config = IMPATIENT if ends_by == "silence" else ONE_BLOCK
    with hand_over(transport, config) as both:
        target = both.reserve("a", (0, 1))
        transfer = both.send_all(target, (0, 1))
        wait_until(lambda: both.sender.bytes_sent == 2 * SIZE)
        transfer.abort(Aborted("gone"))
        if ends_by == "close":
            both.sender.close()
        with pytest.raises(Aborted):
            transfer.done.result(WAIT_S)
        both.table.release(target.key)
        both.events.wait_for("freed", target.key)


def test_no_more_than_a_window_is_on_its_way() -> None:
    hold = threading.Event()
    with hand_over(MemoryTransport(Faults(hold={1: hold})), ONE_BLOCK) as both:
        target = both.reserve("a", tuple(range(8)))
        transfer = both.send_all(target, tuple(range(8)))
        wait_until(lambda: both.sender.bytes_sent == ONE_BLOCK.window_bytes)
        both.sender.check_integrity()
        hold.set()
        transfer.done.result(WAIT_S)
        assert both.sender.bytes_sent == 8 * SIZE
        consume(both, target.key)


# -- gRPC itself ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mebibytes", [1, 5, 70])
def test_a_single_block_of_any_size_passes_grpc(mebibytes: int) -> None:
    layout = KVLayout(1, 1, 1, mebibytes << 17, "float32", "wide")  # one block of this many MiB
    size = layout.block_bytes
    assert size == mebibytes << 20
    with hand_over(GrpcTransport(TRUST, size), layout=layout, num_blocks=2) as both:
        target = both.reserve("a", (1, 0))
        both.send_all(target, (0, 1)).done.result(60)
        consume(both, target.key)
        assert np.array_equal(both.target.array[[1, 0]], both.source.array)


def test_garbage_ends_its_own_stream_and_no_other() -> None:
    with hand_over(GrpcTransport(TRUST, SIZE), ONE_BLOCK) as both:
        target = both.reserve("a", (0, 1))
        transfer = both.sender.open(target)
        transfer.offer((0,), 1)
        wait_until(lambda: both.table.bytes_received == SIZE)
        with open_channel(both.address, TRUST) as channel:
            for garbage in (b"", b"\xff" * 64, encode(Ack(target.key, 1))):
                call = channel.stream_stream(PUSH, None, None)(iter([garbage]))
                with pytest.raises(grpc.RpcError) as caught:
                    list(call)
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
            theft = encode(Blocks(target.key, 2, 1, 1, 0, LAYOUT.num_layers, 0), [b"x" * SIZE])
            forged = [encode(Abort(target.key, "mine now")), theft]
            replies = list(channel.stream_stream(PUSH, None, None)(iter(forged)))
        assert [type(decode(reply)[0]) for reply in replies] == [Refused]
        transfer.commit((0, 1), 8, FIRST)
        transfer.done.result(WAIT_S)
        consume(both, target.key)


def test_a_server_that_is_gone_is_unavailable_soon() -> None:
    with hand_over(GrpcTransport(TRUST, SIZE, connect_timeout_s=0.3), ONE_BLOCK) as both:
        target = both.reserve("a", (0,))
        transfer = both.send_all(replace(target, ways=(Way("grpc", "127.0.0.1:1"),)), (0,))
        with pytest.raises(Unavailable) as caught:
            transfer.done.result(WAIT_S)
        assert caught.value.reason == "KV_CONNECT"
        both.table.release(target.key)


def test_a_port_that_is_taken_is_an_error_at_once() -> None:
    with hand_over(GrpcTransport(TRUST, SIZE)) as both:
        port = int(both.address.rsplit(":", 1)[1])
        with pytest.raises(RuntimeError, match=str(port)):
            GrpcPushServer(both.receiver, TRUST, "127.0.0.1", port, SIZE)


def push_by_hand(both: HandOver, stream: InboundStream, key: TransferKey, source: tuple[int, ...]) -> None:
    digest = Digest()
    frames = [encode(Open(key, INSTANCE, "memory", LAYOUT, len(source), 0, Verify.CHECKSUM))]
    for index, block_id in enumerate(source):
        pieces = both.source.read((block_id,), range(LAYOUT.num_layers))
        digest.add(checksum(pieces))
        frame = Blocks(key, index + 1, index, 1, 0, LAYOUT.num_layers, checksum(pieces))
        frames.append(encode(frame, pieces))
    frames.append(encode(Commit(key, len(source) + 1, len(source), digest.value(), FIRST, 0)))
    for frame in frames:
        assert isinstance(decode(both.receiver.accept(stream, frame) or b"")[0], Ack)


def wait_until(is_true: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(1000):
        if is_true():
            return
        pause.wait(0.01)
    raise AssertionError("it did not come about")
