"""Hand-overs by layers, by a sender that writes D's memory itself, and with each mode of verification."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kv_transfer.codec import decode, encode
from kv_transfer.frame import Ack, Blocks, Commit, Open, Refused, TransferKey
from kv_transfer.send_queue import SenderConfig
from kv_transfer.transport.base import InboundStream
from kv_transfer.transport.memory import Faults, MemoryTransport
from kv_transfer.verify import Digest, Verify, checksum
from pdserve.v1.errors import Aborted, DataLoss, FailedPrecondition
from tests.integrity import wait_until
from tests.unit.kv_transfer.hand_over import FIRST, INSTANCE, LAYOUT, WAIT_S, HandOver

SIZE, LAYER = LAYOUT.block_bytes, LAYOUT.layer_bytes
ALL = range(LAYOUT.num_layers)
TWO_BLOCKS = SenderConfig(frame_bytes=2 * SIZE, window_bytes=4 * SIZE)


def config(verify: Verify | None) -> SenderConfig:
    return SenderConfig(frame_bytes=2 * SIZE, window_bytes=4 * SIZE, verify=verify)


def test_layers_that_no_reservation_fits_are_not_sent_and_their_commit_fails() -> None:
    with HandOver(MemoryTransport(), config=TWO_BLOCKS) as both:
        target = both.reserve("a", (0, 1))
        transfer = both.sender.open(target)
        transfer.offer_layers((0, 1, 2), 12, 1)
        transfer.commit((0, 1, 2), 12, FIRST)
        with pytest.raises(FailedPrecondition):
            transfer.done.result(WAIT_S)
        assert both.table.bytes_received == 0
        both.table.release(target.key)


@pytest.mark.parametrize(("demanded", "offered"), [(d, o) for d in Verify for o in Verify])
def test_a_hand_over_that_is_checked_less_than_demanded_is_refused(demanded: Verify, offered: Verify) -> None:
    with HandOver(MemoryTransport(), config=config(offered), verify=demanded) as both:
        target = both.reserve("a", (0, 1))
        done = both.send_all(target, (0, 1)).done
        if offered >= demanded:
            assert done.result(WAIT_S) is not None
            both.events.wait_for("ready", target.key)
        else:
            with pytest.raises(FailedPrecondition, match=f"{offered.name.lower()} there") as caught:
                done.result(WAIT_S)
            assert caught.value.reason == "WEAK_VERIFY"
        both.table.release(target.key)


@pytest.mark.parametrize("verify", list(Verify))
def test_what_was_damaged_on_its_way_is_seen_by_who_looks(verify: Verify) -> None:
    transport = MemoryTransport(Faults(corrupt=frozenset({1})))
    with HandOver(transport, config=config(verify), verify=verify) as both:
        target = both.reserve("a", (0, 1))
        done = both.send_all(target, (0, 1)).done
        if verify is Verify.OFF:
            assert done.result(WAIT_S) is not None
            both.events.wait_for("ready", target.key)
        else:
            with pytest.raises(DataLoss):
                done.result(WAIT_S)
        both.table.release(target.key)


@pytest.mark.parametrize("is_remote", [False, True])
@pytest.mark.parametrize("verify", list(Verify))
def test_what_was_damaged_while_it_was_written_is_seen_where_the_blocks_are_read_again(
    is_remote: bool, verify: Verify
) -> None:
    with HandOver(
        MemoryTransport(), config=config(verify), is_remote_writer=is_remote, verify=verify
    ) as both:
        write = both.target.write

        def damaging(block_ids: Sequence[int], layers: range, data: memoryview) -> None:
            write(block_ids, layers, data)
            both.target.array[block_ids[-1], layers.stop * LAYER - 1] ^= 1

        both.target.write = damaging  # type: ignore[method-assign]
        target = both.reserve("a", (0, 1))
        done = both.send_all(target, (0, 1)).done
        is_seen = verify is Verify.FULL or (is_remote and verify is Verify.CHECKSUM)
        if is_seen:
            with pytest.raises(DataLoss):
                done.result(WAIT_S)
            assert both.events.errors[target.key].reason == "KV_CHECKSUM"
        else:
            assert done.result(WAIT_S) is not None
            both.events.wait_for("ready", target.key)
        both.table.release(target.key)
        both.events.wait_for("freed", target.key)


def test_only_a_known_remote_writer_may_leave_its_payload_out() -> None:
    with HandOver(MemoryTransport(), config=TWO_BLOCKS) as both:
        target = both.reserve("a", (0, 1))
        stream = InboundStream("test", "memory")

        def answer(frame: Open | Blocks) -> Ack | Refused:
            header, _ = decode(both.receiver.accept(stream, encode(frame)) or b"")
            assert isinstance(header, Ack | Refused)
            return header

        shape = (target.key, INSTANCE, "memory", LAYOUT, 2, 0, Verify.CHECKSUM)
        refused = answer(Open(*shape, is_remote_writer=True))
        assert isinstance(refused, Refused)
        assert refused.reason == "WRONG_TRANSPORT"
        assert answer(Open(*shape)) == Ack(target.key, 0)
        refused = answer(Blocks(target.key, 1, 0, 2, 0, LAYOUT.num_layers, 0))
        assert isinstance(refused, Refused)
        assert refused.reason == "KV_SIZE"
        both.events.wait_for("freed", target.key)


def test_a_remote_writer_is_told_its_blocks_and_freed_by_its_commit() -> None:
    with HandOver(MemoryTransport(), config=TWO_BLOCKS, is_remote_writer=True) as both:
        target = both.reserve("a", (8, 9, 4), num_cached=1)
        transfer = both.sender.open(target)
        assert wait_until(lambda: transfer.remote_block_ids == (9, 4))
        transfer.commit((0, 1, 2), 12, FIRST)
        transfer.done.result(WAIT_S)
        both.events.wait_for("ready", target.key)
        both.table.release(target.key)
        assert both.events.of(target.key) == ["ready", "freed"]


def test_a_remote_writers_blocks_wait_in_quarantine_for_its_closed() -> None:
    with HandOver(MemoryTransport(), config=TWO_BLOCKS, is_remote_writer=True) as both:
        target = both.reserve("a", (8, 9))
        transfer = both.sender.open(target)
        transfer.offer((0, 1), 1)
        assert wait_until(lambda: both.table.bytes_received == SIZE)
        both.table.release(target.key)
        assert both.events.of(target.key) == ["quarantined"]
        transfer.abort(Aborted("gone"))
        both.events.wait_for("freed", target.key)


@pytest.mark.parametrize(
    "second",
    [
        Blocks(TransferKey("a", 0), 2, 0, 1, 0, 2, 0),  # the first layer is there
        Blocks(TransferKey("a", 0), 2, 0, 1, 1, 2, 0),  # no such layer
        Blocks(TransferKey("a", 0), 2, 1, 1, 0, 0, 0),  # nothing
        Blocks(TransferKey("a", 0), 2, 1, 2, 1, 1, 0),  # no such block
    ],
)
def test_cells_that_are_not_due_end_the_transfer(second: Blocks) -> None:
    with HandOver(MemoryTransport(), config=TWO_BLOCKS) as both:
        target = both.reserve("a", (0, 1))
        stream = InboundStream("test", "memory")
        pieces = both.source.read((0,), range(1))
        frames = [
            encode(Open(target.key, INSTANCE, "memory", LAYOUT, 2, 0, Verify.CHECKSUM)),
            encode(Blocks(target.key, 1, 0, 1, 0, 1, checksum(pieces)), pieces),
        ]
        for frame in frames:
            assert isinstance(decode(both.receiver.accept(stream, frame) or b"")[0], Ack)
        junk = b"x" * (second.num_blocks * second.num_layers * LAYER)
        wrong = encode(Blocks(target.key, 2, *_span(second), checksum([junk])), [junk])
        header, _ = decode(both.receiver.accept(stream, wrong) or b"")
        assert isinstance(header, Refused)
        assert header.reason == "WRONG_BLOCKS"
        assert not both.target.array[1].any()
        both.events.wait_for("freed", target.key)


def test_a_commit_before_the_last_layer_is_data_loss() -> None:
    with HandOver(MemoryTransport(), config=TWO_BLOCKS) as both:
        target = both.reserve("a", (0,))
        stream = InboundStream("test", "memory")
        pieces = both.source.read((0,), range(1))
        digest = Digest()
        digest.add(checksum(pieces))
        frames = [
            encode(Open(target.key, INSTANCE, "memory", LAYOUT, 1, 0, Verify.CHECKSUM)),
            encode(Blocks(target.key, 1, 0, 1, 0, 1, checksum(pieces)), pieces),
            encode(Commit(target.key, 2, 1, digest.value(), FIRST, 0)),
        ]
        replies = [decode(both.receiver.accept(stream, frame) or b"")[0] for frame in frames]
        assert isinstance(replies[-1], Refused)
        assert replies[-1].reason == "MISSING"
        assert both.table.consume(target.key) is None
        both.events.wait_for("freed", target.key)


def _span(frame: Blocks) -> tuple[int, int, int, int]:
    return frame.first_block, frame.num_blocks, frame.first_layer, frame.num_layers
