"""What `kv_transfer/transport/base.py` promises, over every transport: one suite for all of them.

Where there is a GPU, once more from and to pools on it, by pinned buffers. (By shm D's blocks stay in host
memory, the only kind that can be shared so.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from kv_transfer.blocks import BufferBlocks, Cells
from kv_transfer.frame import Blocks, Commit, Header, TransferKey
from kv_transfer.send_queue import SenderConfig
from kv_transfer.transfer import Transfer, TransferReport
from kv_transfer.verify import Verify
from pdserve.v1.errors import Aborted, DataLoss, FailedPrecondition, NotFound, PdserveError, Unavailable
from tests.integrity import wait_until
from tests.unit.kv_transfer.hand_over import FIRST, LAYOUT, WAIT_S, HandOver, Meddle, Medium, Send

# "late reader" is the memory transport where it reads payloads until they are answered.
TRANSPORTS = ["memory", "late reader", "grpc", "shm", "collective"]
SIZE, LAYER = LAYOUT.block_bytes, LAYOUT.layer_bytes
ONE_BLOCK = SenderConfig(frame_bytes=SIZE, window_bytes=2 * SIZE, ack_timeout_s=10.0)


NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
NEEDS_TWO = pytest.mark.skip(reason="NCCL takes no two ranks on one GPU; for two, benchmarks/nccl_pair.py")
MEDIA = [
    *(pytest.param(Medium(name), id=name) for name in TRANSPORTS),
    *(
        pytest.param(
            Medium(name, "cuda"),
            id=f"{name} on cuda",
            marks=NEEDS_TWO if name == "collective" else NEEDS_GPU,
        )
        for name in TRANSPORTS
    ),
]


@pytest.fixture(params=MEDIA)
def transport(request: pytest.FixtureRequest) -> Medium:
    medium: Medium = request.param
    return medium


@pytest.fixture
def both(transport: Medium) -> Iterator[HandOver]:
    with HandOver(transport, config=ONE_BLOCK) as made:
        yield made


def consume(both: HandOver, key: TransferKey) -> None:
    both.events.wait_for("ready", key)
    assert both.table.consume(key) is not None


def assert_next_arrives(both: HandOver) -> None:
    """Whatever was before."""
    target = both.reserve("next", (30, 31))
    both.send_all(target, (0, 1)).done.result(WAIT_S)
    consume(both, target.key)
    assert np.array_equal(both.target.array[[30, 31]], both.source.array[:2])


# -- an ordinary hand-over ---------------------------------------------------------------------------


def test_blocks_arrive_where_they_were_reserved(both: HandOver) -> None:
    target = both.reserve("a", (5, 3, 9))
    report = both.send_all(target, (0, 1, 2)).done.result(WAIT_S)
    assert report is not None
    assert (report.num_blocks, report.transfer_bytes) == (3, 3 * SIZE)
    assert both.sender.bytes_sent == both.table.bytes_received == 3 * SIZE
    consume(both, target.key)
    assert np.array_equal(both.target.array[[5, 3, 9]], both.source.array[[0, 1, 2]])
    assert not both.target.array[[0, 1, 2, 4, 6, 7, 8]].any()


def test_cached_blocks_are_not_sent_and_not_touched(both: HandOver) -> None:
    target = both.reserve("a", (5, 3, 9), num_cached=2)
    report = both.send_all(target, (0, 1, 2)).done.result(WAIT_S)
    assert report is not None
    assert report.num_blocks == 1
    consume(both, target.key)
    assert not both.target.array[[5, 3]].any()
    assert np.array_equal(both.target.array[9], both.source.array[2])


def test_a_wholly_cached_prompt_ships_nothing_but_its_commit(both: HandOver) -> None:
    target = both.reserve("a", (5, 3), num_cached=2)
    report = both.send_all(target, (0, 1)).done.result(WAIT_S)
    assert report is not None
    assert (report.num_blocks, report.transfer_bytes) == (0, 0)
    consume(both, target.key)


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 7, 8])
def test_what_lies_behind_the_written_tokens_stays_at_home(both: HandOver, num_tokens: int) -> None:
    num_blocks = LAYOUT.num_blocks_for(num_tokens)
    target = both.reserve("a", tuple(range(num_blocks)))
    both.send_all(target, tuple(range(num_blocks)), num_tokens).done.result(WAIT_S)
    consume(both, target.key)
    shape = (num_blocks, 2 * 2 * 2, 4, 8 * 4)  # block, planes, token, bytes
    arrived, sent = (store.array[:num_blocks].reshape(shape) for store in (both.target, both.source))
    for token in range(num_blocks * 4):
        there, here = arrived[token // 4, :, token % 4], sent[token // 4, :, token % 4]
        assert np.array_equal(there, here) if token < num_tokens else not there.any()


def test_finished_blocks_leave_before_the_rest_is_computed(both: HandOver) -> None:
    target = both.reserve("a", (0, 1, 2, 3))
    transfer = both.sender.open(target)
    transfer.offer((0, 1), 2)
    assert wait_until(lambda: both.table.bytes_received == 2 * SIZE)
    transfer.offer((0, 1, 2), 2)  # nothing new
    transfer.commit((0, 1, 2, 3), 16, FIRST)
    transfer.done.result(WAIT_S)
    consume(both, target.key)
    assert np.array_equal(both.target.array[:4], both.source.array[:4])


def test_token_zero_that_ends_it_gives_the_reservation_back_at_once(both: HandOver) -> None:
    target = both.reserve("a", (0, 1))
    transfer = both.sender.open(target)
    transfer.offer((0,), 1)
    assert wait_until(lambda: both.table.bytes_received == SIZE)
    transfer.not_needed()
    assert transfer.done.result(WAIT_S) is None
    both.events.wait_for("freed", target.key)
    assert [what for what in both.events.of(target.key) if what != "quarantined"] == ["freed"]


def test_an_abort_at_any_moment_gives_both_sides_back(both: HandOver) -> None:
    for num_offered in range(4):
        target = both.reserve(f"abort-{num_offered}", (0, 1, 2))
        transfer = both.sender.open(target)
        transfer.offer((0, 1, 2), num_offered)
        transfer.abort(Aborted("the client went away"))
        transfer.abort(Aborted("again"))
        with pytest.raises(Aborted, match="went away"):
            transfer.done.result(WAIT_S)
        both.table.release(target.key)
        both.events.wait_for("freed", target.key)


def test_many_at_once_arrive_whole(both: HandOver) -> None:
    targets = [both.reserve(f"t{i}", (2 * i, 2 * i + 1)) for i in range(16)]
    transfers = [both.send_all(t, (2 * i + 1, 2 * i)) for i, t in enumerate(targets)]
    for target, transfer in zip(targets, transfers, strict=True):
        transfer.done.result(WAIT_S)
        consume(both, target.key)
    swapped = [i ^ 1 for i in range(32)]
    assert np.array_equal(both.target.array, both.source.array[swapped])


@pytest.mark.parametrize(
    ("spoil", "error", "reason"),
    [
        ({"instance_id": "an earlier process"}, FailedPrecondition, "WRONG_INSTANCE"),
        ({"key": TransferKey("forged", 0)}, NotFound, "UNKNOWN_TRANSFER"),
        ({"key": TransferKey("a", 0)}, FailedPrecondition, "TRANSFER_ENDED"),
        ({"key": TransferKey("a", 2)}, NotFound, "UNKNOWN_TRANSFER"),
        ({"num_cached_blocks": 1}, FailedPrecondition, "WRONG_BLOCKS"),
        ({"num_blocks": 1}, FailedPrecondition, "WRONG_BLOCKS"),
    ],
)
def test_a_hand_off_that_is_not_for_here_is_refused(
    both: HandOver, spoil: dict[str, str], error: type[PdserveError], reason: str
) -> None:
    target = both.reserve("a", (0, 1), epoch=1)
    transfer = both.sender.open(replace(target, **spoil))  # type: ignore[arg-type]
    with pytest.raises(error) as caught:
        transfer.done.result(WAIT_S)
    assert caught.value.reason == reason
    # The true one is unharmed.
    both.send_all(target, (0, 1)).done.result(WAIT_S)
    consume(both, target.key)
    replayed = both.send_all(target, (0, 1))
    with pytest.raises(FailedPrecondition):
        replayed.done.result(WAIT_S)


def test_the_senders_wait_does_not_let_the_lease_run_out(both: HandOver) -> None:
    target = both.reserve("a", (0,), lease_s=0.3)
    transfer = both.sender.open(target)
    deadline = threading.Event()
    for _ in range(6):
        deadline.wait(0.1)
        both.table.expire()
    transfer.commit((0,), 4, FIRST)
    assert isinstance(transfer.done.result(WAIT_S), TransferReport)
    consume(both, target.key)


def test_a_lease_that_ran_out_is_a_clear_error_for_the_sender(both: HandOver) -> None:
    target = both.reserve("a", (0,), lease_s=0.0)
    both.table.expire()
    with pytest.raises(FailedPrecondition) as caught:
        both.send_all(target, (0,)).done.result(WAIT_S)
    assert caught.value.reason == "TRANSFER_ENDED"
    assert both.table.num_expired_leases == 1


def test_a_released_reservation_stops_its_sender(both: HandOver) -> None:
    target = both.reserve("a", (0, 1), lease_s=0.3)
    transfer = both.sender.open(target)
    transfer.offer((0,), 1)
    assert wait_until(lambda: both.table.bytes_received == SIZE)
    both.table.release(target.key)
    with pytest.raises(FailedPrecondition):  # by its next sign of life at the latest
        transfer.done.result(WAIT_S)


def test_closing_the_sender_fails_what_is_under_way_on_both_sides(both: HandOver) -> None:
    target = both.reserve("a", (0, 1))
    transfer = both.sender.open(target)
    transfer.offer((0,), 1)
    assert wait_until(lambda: both.table.bytes_received == SIZE)
    both.sender.close()
    with pytest.raises(Unavailable):
        transfer.done.result(WAIT_S)
    both.events.wait_for("freed", target.key)
    with pytest.raises(Unavailable):
        both.sender.open(target)


# -- by layers, with each mode of verification -------------------------------------------------------


@pytest.mark.parametrize("verify", list(Verify))
@pytest.mark.parametrize("num_cached", [0, 1])
def test_blocks_and_then_layers_arrive_where_they_belong(
    transport: Medium, verify: Verify, num_cached: int
) -> None:
    config = SenderConfig(frame_bytes=2 * SIZE, window_bytes=4 * SIZE, verify=verify)
    with HandOver(transport, config=config, verify=verify) as both:
        target = both.reserve("a", (7, 5, 3, 9, 1), num_cached)
        transfer = both.sender.open(target)
        transfer.offer((0, 1), 2)
        assert wait_until(lambda: both.table.bytes_received == (2 - num_cached) * SIZE)
        transfer.offer_layers((0, 1, 2, 3, 4), 18, 1)
        assert wait_until(lambda: both.table.bytes_received == (2 - num_cached) * SIZE + 3 * LAYER)
        hidden = both.table.bytes_received
        assert wait_until(lambda: transfer.bytes_acknowledged == hidden)
        transfer.commit((0, 1, 2, 3, 4), 18, FIRST)
        assert transfer.done.result(WAIT_S) is not None
        report = transfer.done.result()
        assert isinstance(report, TransferReport)
        num_shipped = 5 - num_cached
        assert (report.transfer_bytes, report.num_blocks) == (num_shipped * SIZE, num_shipped)
        assert report.hidden_bytes == hidden
        both.events.wait_for("ready", target.key)
        assert both.table.consume(target.key) is not None
        expected = both.source.array[:5].copy()
        expected[:num_cached] = 0  # not shipped
        expected[4].reshape(-1, LAYOUT.block_size, LAYOUT.head_dim * 4)[:, 2:] = (
            0  # of 4 tokens 2 are written
        )
        assert np.array_equal(both.target.array[[7, 5, 3, 9, 1]], expected)


@pytest.mark.parametrize("frame_bytes", [LAYER, SIZE, 3 * SIZE])
def test_many_by_blocks_and_layers_at_once_arrive_whole(transport: Medium, frame_bytes: int) -> None:
    """Their frames take turns; each transfer's stay in order, or D would refuse them."""
    with HandOver(transport, config=SenderConfig(frame_bytes=frame_bytes, window_bytes=4 * SIZE)) as both:
        targets = [both.reserve(f"t{i}", tuple(range(31 - 4 * i, 27 - 4 * i, -1))) for i in range(8)]
        transfers = [both.sender.open(target) for target in targets]
        for i, transfer in enumerate(transfers):
            ids = tuple(range(4 * i, 4 * i + 4))
            transfer.offer(ids, i % 3)
            transfer.offer_layers(ids, 16, 1)
        for i, transfer in enumerate(transfers):
            transfer.commit(tuple(range(4 * i, 4 * i + 4)), 16, FIRST)
        for target, transfer in zip(targets, transfers, strict=True):
            transfer.done.result(WAIT_S)
            consume(both, target.key)
        assert np.array_equal(both.target.array[::-1], both.source.array)


@pytest.mark.parametrize(("demanded", "offered"), [(d, o) for d in Verify for o in Verify if o < d])
def test_a_hand_over_that_is_checked_less_than_demanded_is_refused(
    transport: Medium, demanded: Verify, offered: Verify
) -> None:
    with HandOver(transport, config=SenderConfig(verify=offered), verify=demanded) as both:
        target = both.reserve("a", (0,))
        with pytest.raises(FailedPrecondition) as caught:
            both.send_all(target, (0,)).done.result(WAIT_S)
        assert caught.value.reason == "WEAK_VERIFY"
        both.table.release(target.key)


# -- frames that are lost, doubled or damaged --------------------------------------------------------


@contextmanager
def meddled(
    transport: Medium, meddle: Meddle, config: SenderConfig = ONE_BLOCK, verify: Verify | None = None
) -> Iterator[HandOver]:
    with HandOver(transport, config=replace(config, verify=verify), verify=verify, meddle=meddle) as both:
        yield both


@pytest.mark.parametrize("twice", [0, 1, 2, 3])
def test_a_frame_that_is_sent_twice_is_applied_once(transport: Medium, twice: int) -> None:
    def meddle(send: Send, number: int, header: Header, payload: Cells | None, target: Sequence[int]) -> None:
        for _ in range(2 if number == twice else 1):
            send(header, payload, target)

    with meddled(transport, meddle) as both:
        target = both.reserve("a", (4, 7))
        both.send_all(target, (0, 1)).done.result(WAIT_S)
        consume(both, target.key)
        assert np.array_equal(both.target.array[[4, 7]], both.source.array[:2])
        assert both.table.bytes_received == 2 * SIZE
        assert_next_arrives(both)


@pytest.mark.parametrize("verify", list(Verify))
@pytest.mark.parametrize("damaged", [1, 2])
def test_damage_on_the_way_is_seen_by_who_looks(transport: Medium, verify: Verify, damaged: int) -> None:
    spoiled = BufferBlocks(32, LAYOUT)

    def meddle(send: Send, number: int, header: Header, payload: Cells | None, target: Sequence[int]) -> None:
        if number == damaged and payload is not None:
            payload = Cells(spoiled, payload.block_ids, payload.layers, payload.num_tail_tokens)
        send(header, payload, target)

    with meddled(transport, meddle, verify=verify) as both:
        spoiled.array[:] = both.source.array
        spoiled.array[:, -1] ^= 1
        target = both.reserve("a", (4, 7))
        transfer = both.send_all(target, (0, 1))
        if verify is Verify.OFF:
            transfer.done.result(WAIT_S)
            consume(both, target.key)
            return
        with pytest.raises(DataLoss) as caught:
            transfer.done.result(WAIT_S)
        assert caught.value.reason == "KV_CHECKSUM"
        assert isinstance(both.events.errors[target.key], DataLoss)
        both.events.wait_for("freed", target.key)
        assert_next_arrives(both)


@pytest.mark.parametrize("verify", [Verify.CHECKSUM, Verify.FULL])
def test_a_wrong_digest_is_data_loss_on_both_sides(transport: Medium, verify: Verify) -> None:
    def meddle(send: Send, number: int, header: Header, payload: Cells | None, target: Sequence[int]) -> None:
        if isinstance(header, Commit) and header.key.transfer_id == "a":
            header = replace(header, digest=header.digest ^ 1)
        send(header, payload, target)

    with meddled(transport, meddle, verify=verify) as both:
        target = both.reserve("a", (4, 7))
        with pytest.raises(DataLoss) as caught:
            both.send_all(target, (0, 1)).done.result(WAIT_S)
        assert caught.value.reason == "KV_DIGEST"
        assert both.table.consume(target.key) is None
        both.events.wait_for("freed", target.key)
        assert_next_arrives(both)


@pytest.mark.parametrize("lost", [1, 2])
def test_a_lost_frame_fails_its_transfer_and_no_other(transport: Medium, lost: int) -> None:
    def meddle(send: Send, number: int, header: Header, payload: Cells | None, target: Sequence[int]) -> None:
        if number != lost:
            send(header, payload, target)

    with meddled(transport, meddle) as both:
        target = both.reserve("a", (4, 7))
        with pytest.raises(PdserveError) as caught:
            both.send_all(target, (0, 1)).done.result(WAIT_S)
        assert caught.value.reason == "FRAME_LOST"
        both.events.wait_for("freed", target.key)
        assert_next_arrives(both)


# -- a peer that is gone, stands still or is shut out --------------------------------------------------


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_sender_whose_connection_dies_fails_both_ends_and_the_next_one_works(
    transport: Medium, at: int
) -> None:
    def meddle(send: Send, number: int, header: Header, payload: Cells | None, target: Sequence[int]) -> None:
        if number == at:
            raise Unavailable("pulled out", reason="KV_STREAM_BROKEN")
        send(header, payload, target)

    with meddled(transport, meddle) as both:
        target = both.reserve("a", (4, 7))
        with pytest.raises(Unavailable):
            both.send_all(target, (0, 1)).done.result(WAIT_S)
        both.events.wait_for("freed", target.key)
        assert isinstance(both.events.errors[target.key], Unavailable)
        assert_next_arrives(both)


def test_a_receiver_that_stops_fails_what_was_on_its_way(both: HandOver) -> None:
    target = both.reserve("a", (4, 7))
    transfer = both.sender.open(target)
    transfer.offer((0,), 1)
    assert wait_until(lambda: both.table.bytes_received == SIZE)
    both.stop_listening()
    with pytest.raises(Unavailable):
        transfer.done.result(WAIT_S)
    both.events.wait_for("freed", target.key)


class Gate:
    """Lets D take frames, or not."""

    def __init__(self, both: HandOver, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open = threading.Event()
        self.is_open.set()
        for name in ("accept", "land"):
            monkeypatch.setattr(both.receiver, name, self._guarded(getattr(both.receiver, name)))

    def _guarded(self, take: Callable[..., object]) -> Callable[..., object]:
        def guarded(*arguments: object) -> object:
            assert self.is_open.wait(WAIT_S)
            return take(*arguments)

        return guarded


def test_a_full_window_holds_the_sender_until_there_is_room(
    transport: Medium, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_sent = 0

    def meddle(send: Send, number: int, header: Header, payload: Cells | None, target: Sequence[int]) -> None:
        nonlocal num_sent
        num_sent += isinstance(header, Blocks)
        send(header, payload, target)

    config = SenderConfig(frame_bytes=SIZE, window_bytes=3 * SIZE)
    with meddled(transport, meddle, config) as both:
        gate = Gate(both, monkeypatch)
        target = both.reserve("a", tuple(range(16)))
        transfer = both.sender.open(target)
        assert wait_until(lambda: transfer.state.name == "SENDING")
        gate.is_open.clear()
        transfer.commit(tuple(range(16)), 64, FIRST)
        assert wait_until(lambda: num_sent == 3)
        assert not wait_until(lambda: num_sent > 3 or transfer.done.done(), timeout_s=0.3)
        gate.is_open.set()
        transfer.done.result(WAIT_S)
        consume(both, target.key)
        assert np.array_equal(both.target.array[:16], both.source.array[:16])


def test_a_receiver_that_stands_still_is_given_up(transport: Medium, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SenderConfig(frame_bytes=SIZE, window_bytes=3 * SIZE, ack_timeout_s=0.3)
    with HandOver(transport, config=config) as both:
        gate = Gate(both, monkeypatch)
        target = both.reserve("a", (4, 7))
        transfer = both.sender.open(target)
        assert wait_until(lambda: transfer.state.name == "SENDING")
        gate.is_open.clear()
        transfer.offer((0, 1), 2)
        # The connection may take until D is out of its frame to be closed.
        opening = threading.Timer(1.0, gate.is_open.set)
        opening.start()
        with pytest.raises(Unavailable) as caught:
            transfer.done.result(WAIT_S)
        assert caught.value.reason == "KV_ACK_TIMEOUT"
        opening.join()
        both.events.wait_for("freed", target.key)
        assert_next_arrives(both)


def test_an_older_epoch_is_shut_out_while_the_newer_one_arrives(both: HandOver) -> None:
    older = both.reserve("a", (4, 7))
    transfer = both.sender.open(older)
    transfer.offer((0,), 1)
    assert wait_until(lambda: both.table.bytes_received == SIZE)
    newer = both.reserve("a", (10, 11), epoch=1)
    before = both.target.array[[4, 7]].copy()
    both.send_all(newer, (2, 3)).done.result(WAIT_S)
    consume(both, newer.key)
    transfer.commit((0, 1), 8, FIRST)
    with pytest.raises(PdserveError) as caught:
        transfer.done.result(WAIT_S)
    assert caught.value.reason == "TRANSFER_ENDED"
    both.events.wait_for("freed", older.key)
    assert np.array_equal(both.target.array[[10, 11]], both.source.array[[2, 3]])
    assert np.array_equal(both.target.array[4], before[0])


def test_blocks_of_an_aborted_transfer_are_not_written_by_it_any_more(both: HandOver) -> None:
    """What is free again may be somebody else's."""
    for number in range(10):
        target = both.reserve(f"a{number}", (4, 7))
        transfer = both.sender.open(target)
        transfer.offer((0, 1), 1 + number % 2)
        _abort(transfer)
        both.table.release(target.key)
        both.events.wait_for("freed", target.key)
        second = both.reserve(f"b{number}", (7, 4))
        both.send_all(second, (2, 3)).done.result(WAIT_S)
        consume(both, second.key)
        assert np.array_equal(both.target.array[[7, 4]], both.source.array[[2, 3]])


def _abort(transfer: Transfer) -> None:
    transfer.abort(Aborted("the client went away"))
    with pytest.raises(Aborted):
        transfer.done.result(WAIT_S)
