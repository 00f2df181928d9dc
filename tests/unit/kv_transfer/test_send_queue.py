"""What is sent next: bookkeeping without threads, with a clock in the test's hand."""

from __future__ import annotations

import itertools

import pytest

from engine.errors import IntegrityError
from engine.request import NewToken
from kv_transfer.frame import Abort, Ack, Blocks, Closed, Commit, Open, Refused, Renew, TransferKey
from kv_transfer.send_queue import SenderConfig, SendQueue
from kv_transfer.transfer import LEGAL_MOVES, PushTarget, Transfer, TransferState
from kv_transfer.verify import Verify
from kv_transfer.ways import Way
from pdserve.v1.errors import Aborted, DataLoss, FailedPrecondition, PdserveError
from tests.unit.kv_transfer.hand_over import FIRST, LAYOUT

SIZE = LAYOUT.block_bytes
CONFIG = SenderConfig(frame_bytes=2 * SIZE, window_bytes=3 * SIZE, ack_timeout_s=5.0)
STATES = list(TransferState)


class Unasked:
    """A transfer's owner is not part of these tests."""

    def offer(self, transfer: Transfer, block_ids: tuple[int, ...], num_ready_blocks: int) -> None: ...

    def offer_layers(
        self, transfer: Transfer, block_ids: tuple[int, ...], num_tokens: int, num_layers: int
    ) -> None: ...

    def commit(
        self, transfer: Transfer, block_ids: tuple[int, ...], num_tokens: int, first: NewToken
    ) -> None: ...

    def withdraw(self, transfer: Transfer, error: PdserveError | None) -> None: ...


def transfer(name: str, num_blocks: int = 4, lease_s: float = 3.0) -> Transfer:
    target = PushTarget(TransferKey(name, 0), "d", (Way("grpc", "address"),), 0, num_blocks, lease_s)
    return Transfer(target, LAYOUT.num_layers, Unasked())


@pytest.fixture
def queue() -> SendQueue:
    return SendQueue(LAYOUT, CONFIG)


def kinds(queue: SendQueue, now: float = 0.0) -> list[str]:
    """Everything that is due now, in order."""
    due = iter(lambda: queue.next(now), None)
    return [f"{type(d.header).__name__} {d.header.key.transfer_id}" for d in due]


def ack(queue: SendQueue, one: Transfer, seq: int, now: float = 0.0) -> Transfer | None:
    return queue.answered(Ack(one.key, seq), now)


@pytest.mark.parametrize(("source", "target"), list(itertools.product(STATES, STATES)))
def test_only_moves_of_the_table_are_possible(source: TransferState, target: TransferState) -> None:
    one = transfer("a")
    one.state = source
    if target in LEGAL_MOVES[source]:
        one.move(target)
        assert one.state is target
    else:
        with pytest.raises(IntegrityError):
            one.move(target)


def test_no_block_leaves_before_d_has_answered_the_open(queue: SendQueue) -> None:
    one = transfer("a")
    queue.add(one)
    one.progress.offer_blocks(4)
    assert kinds(queue) == ["Open a"]
    ack(queue, one, 0)
    assert kinds(queue) == ["Blocks a", "Blocks a"]


def test_a_commit_goes_behind_the_last_block_and_its_answer_ends_the_transfer(queue: SendQueue) -> None:
    one = transfer("a", num_blocks=1)
    queue.add(one)
    one.progress.offer_blocks(1)
    one.first = FIRST
    queue.next(0.0)
    assert ack(queue, one, 0) is one
    blocks, commit = queue.next(0.0), queue.next(0.0)
    assert blocks is not None
    assert commit is not None
    assert isinstance(blocks.header, Blocks)
    assert isinstance(commit.header, Commit)
    assert ack(queue, one, blocks.header.seq) is one
    assert one.state is TransferState.COMMITTED
    assert ack(queue, one, commit.header.seq) is one
    assert one.state is TransferState.ACKED
    assert ack(queue, one, commit.header.seq) is None
    assert len(queue) == 0
    assert queue.next(0.0) is None


def test_transfers_take_turns_and_the_window_bounds_them_together(queue: SendQueue) -> None:
    both = [transfer("a", 8), transfer("b", 8)]
    for one in both:
        queue.add(one)
        one.progress.offer_blocks(8)
    assert kinds(queue) == ["Open a", "Open b"]
    for one in both:
        ack(queue, one, 0)
    assert kinds(queue) == ["Blocks a", "Blocks b"]  # two blocks and one: the window is full
    ack(queue, both[0], 1)
    assert kinds(queue) == ["Blocks a"]
    queue.check_integrity()


def test_a_waiting_transfer_shows_a_sign_of_life_each_third_of_its_lease(queue: SendQueue) -> None:
    one = transfer("a", lease_s=3.0)
    queue.add(one)
    queue.next(0.0)
    assert queue.patience_s(0.0) == CONFIG.ack_timeout_s  # the Open is not answered
    ack(queue, one, 0)
    assert queue.patience_s(0.25) == 0.75
    assert queue.next(0.9) is None
    due = queue.next(1.0)
    assert due is not None
    assert due.header == Renew(one.key, 0)
    assert queue.next(1.0) is None


def test_a_silent_peer_is_noticed(queue: SendQueue) -> None:
    one = transfer("a")
    queue.add(one)
    queue.next(0.0)
    assert not queue.is_peer_silent(4.9)
    assert queue.is_peer_silent(5.0)
    ack(queue, one, 0)
    assert not queue.is_peer_silent(100.0)


def test_a_peer_that_answers_slowly_is_not_silent(queue: SendQueue) -> None:
    """A window's frames on a slow way: each waits for longer than a silent peer is borne."""
    one = transfer("a", num_blocks=8)
    queue.add(one)
    one.progress.offer_blocks(8)
    queue.next(0.0)
    ack(queue, one, 0, now=1.0)
    assert kinds(queue, now=1.0) == ["Blocks a", "Blocks a"]
    for seq, now in ((1, 4.0), (2, 8.0), (3, 12.0)):
        assert not queue.is_peer_silent(now)
        ack(queue, one, seq, now)
        assert kinds(queue, now) == ["Blocks a"]
        assert queue.patience_s(now) == CONFIG.ack_timeout_s
    assert not queue.is_peer_silent(16.9)
    assert queue.is_peer_silent(17.0)


@pytest.mark.parametrize("error", [None, Aborted("gone")])
def test_a_transfer_that_is_taken_back_says_so_even_before_its_open(
    queue: SendQueue, error: PdserveError | None
) -> None:
    one = transfer("a")
    queue.add(one)
    queue.withdraw(one, error)
    headers = [due.header for due in iter(lambda: queue.next(0.0), None)]
    assert [type(header) for header in headers] == [Open, Abort, Closed]
    assert one.state is (TransferState.NOT_NEEDED if error is None else TransferState.FAILED)
    assert len(queue) == 0
    assert ack(queue, one, 0) is None


def test_a_refusal_fails_its_transfer_and_the_rest_of_it_stays_in_the_window(queue: SendQueue) -> None:
    one = transfer("a")
    queue.add(one)
    one.progress.offer_blocks(4)
    queue.next(0.0)
    ack(queue, one, 0)
    kinds(queue)
    assert queue.answered(Refused(one.key, 1, 15, "KV_CHECKSUM", "damaged"), 0.0) is one
    assert isinstance(one.error, DataLoss)
    assert one.error.reason == "KV_CHECKSUM"
    assert kinds(queue) == ["Closed a"]
    queue.check_integrity()
    assert one.num_payloads_unanswered == 1
    assert queue.is_peer_silent(5.0)
    with pytest.raises(FailedPrecondition):
        queue.add(transfer("a"))
    assert queue.answered(Refused(one.key, 2, 15, "KV_CHECKSUM", "damaged"), 0.0) is one
    assert one.num_payloads_unanswered == 0
    assert not queue.is_peer_silent(5.0)
    queue.check_integrity()


def test_an_answer_stands_for_the_older_ones_that_got_lost(queue: SendQueue) -> None:
    one, other = transfer("a"), transfer("b")
    for each in (one, other):
        queue.add(each)
        each.progress.offer_blocks(4)
    kinds(queue)
    for each in (one, other):
        ack(queue, each, 0)
    assert kinds(queue) == ["Blocks a", "Blocks b"]
    ack(queue, other, 1)
    assert kinds(queue) == ["Blocks a"]
    assert one.num_unanswered == 2
    ack(queue, one, 2)
    assert one.num_unanswered == 0
    assert ack(queue, one, 1) is None
    queue.check_integrity()


@pytest.mark.parametrize(("is_apart", "frame_bytes"), [(False, 4 << 20), (True, 5 << 20)])
def test_a_frame_whose_payload_goes_apart_may_be_larger_than_a_message(
    is_apart: bool, frame_bytes: int
) -> None:
    queue = SendQueue(LAYOUT, SenderConfig(frame_bytes=5 << 20))
    queue.connected("any", is_remote_writer=False, is_apart=is_apart, usual_verify=Verify.CHECKSUM)
    one = transfer("a", num_blocks=(64 << 20) // SIZE)
    queue.add(one)
    one.progress.offer_blocks(one.target.num_blocks)
    queue.next(0.0)
    ack(queue, one, 0)
    due = queue.next(0.0)
    assert due is not None
    assert isinstance(due.header, Blocks)
    assert due.header.num_blocks == frame_bytes // SIZE


def test_a_key_is_open_once(queue: SendQueue) -> None:
    queue.add(transfer("a"))
    with pytest.raises(FailedPrecondition):
        queue.add(transfer("a"))
