"""Answers on their way back: which leave together, and that none is lost, late or out of order."""

from __future__ import annotations

import threading

import grpc
import pytest

from kv_transfer.codec import FrameError, decode_answers, encode
from kv_transfer.frame import Ack, Closed, Refused, TransferKey
from kv_transfer.transport.answers import MAX_UNREAD, Answers

KEY = TransferKey("a", 0)
LONG = 2 * 1024 * 1024
SHORT = 100


def said(answers: Answers) -> list[list[int]]:
    """The seqs in each message."""
    return [[answer.seq for answer in decode_answers(raw)] for raw in answers]


def put(answers: Answers, seqs: range, frame_bytes: int) -> None:
    for seq in seqs:
        answers.put(encode(Ack(KEY, seq)), frame_bytes)


def test_answers_to_short_frames_leave_one_by_one() -> None:
    answers = Answers()
    put(answers, range(3), SHORT)
    answers.close()
    assert said(answers) == [[0], [1], [2]]


def test_answers_to_long_frames_leave_together_up_to_four_and_in_order() -> None:
    answers = Answers()
    put(answers, range(6), LONG)
    answers.close()
    assert said(answers) == [[0, 1, 2, 3], [4, 5]]


def test_the_answer_to_a_short_frame_takes_along_those_that_wait_and_waits_for_none() -> None:
    answers = Answers()
    put(answers, range(2), LONG)
    put(answers, range(2, 3), SHORT)
    put(answers, range(3, 5), LONG)
    answers.close()
    assert said(answers) == [[0, 1, 2], [3, 4]]


def test_an_answer_behind_which_nothing_comes_leaves_all_the_same() -> None:
    answers = Answers()
    put(answers, range(1), LONG)
    first: list[bytes] = []
    reading = threading.Thread(target=lambda: first.append(next(iter(answers))), daemon=True)
    reading.start()
    reading.join(10)
    assert [answer.seq for answer in decode_answers(first[0])] == [0]


@pytest.mark.parametrize("frame_bytes", [SHORT, LONG])
def test_an_error_comes_behind_the_last_answer(frame_bytes: int) -> None:
    answers = Answers()
    put(answers, range(1), frame_bytes)
    answers.close(FrameError("garbage"))
    messages = iter(answers)
    assert next(messages) == encode(Ack(KEY, 0))
    with pytest.raises(FrameError, match="garbage"):
        next(messages)


def test_a_peer_that_reads_no_answers_cannot_pile_them_up() -> None:
    answers = Answers()
    put(answers, range(MAX_UNREAD), SHORT)
    with pytest.raises(FrameError, match="not read"):
        put(answers, range(1), SHORT)
    next(iter(answers))
    put(answers, range(1), SHORT)


def test_a_broken_call_ends_the_answers() -> None:
    answers = Answers()
    answers.close(grpc.RpcError())
    with pytest.raises(grpc.RpcError):
        next(iter(answers))


def test_answers_that_came_together_are_read_as_they_were_said() -> None:
    expected: list[Ack | Refused] = [
        Ack(KEY, 1),
        Refused(KEY, 2, 15, "KV_CHECKSUM", "damaged"),
        Ack(KEY, 3, (4, 5)),
    ]
    assert decode_answers(b"".join(encode(answer) for answer in expected)) == expected


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        encode(Ack(KEY, 1)) + b"\0",
        encode(Ack(KEY, 1)) + encode(Ack(KEY, 2))[:-1],
        encode(Ack(KEY, 1)) + encode(Closed(KEY)),
    ],
    ids=["nothing", "a byte behind", "cut short", "from the wrong side"],
)
def test_what_is_no_row_of_answers_is_refused(raw: bytes) -> None:
    with pytest.raises(FrameError):
        decode_answers(raw)
