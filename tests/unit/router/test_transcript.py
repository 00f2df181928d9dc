from __future__ import annotations

import pytest

from pdserve.v1 import generation_pb2
from router.text.transcript import Ending, StopText, Transcript
from router.tokens import Token

EOS, STOP, LENGTH = (
    generation_pb2.FINISH_REASON_EOS,
    generation_pb2.FINISH_REASON_STOP,
    generation_pb2.FINISH_REASON_LENGTH,
)


class Letters:
    """Id 1 is "a", 2 is "b", …"""

    def push(self, token_id: int) -> str:
        return chr(ord("a") + token_id - 1)

    def flush(self) -> str:
        return ""


def tokens(ids: list[int], last: generation_pb2.FinishReason | None = None) -> list[Token]:
    made = [Token(position, each) for position, each in enumerate(ids)]
    if last is not None:
        made[-1] = Token(len(ids) - 1, ids[-1], finish_reason=last)
    return made


@pytest.mark.parametrize(
    ("stop", "ids", "last", "text", "num_tokens", "ending"),
    [
        (StopText(), [1, 2, 3], LENGTH, "abc", 3, Ending(LENGTH)),
        (StopText(), [1, 2, 3], EOS, "ab", 3, Ending(EOS)),
        (StopText(), [1, 2, 3], STOP, "ab", 3, Ending(STOP, matched_token_id=3)),
        (StopText(keep_in_text=True), [1, 2], STOP, "ab", 2, Ending(STOP, matched_token_id=2)),
        (StopText(("bc",)), [1, 2, 3, 4], LENGTH, "a", 3, Ending(STOP, "bc", by_worker=False)),
        (StopText(("bc",), keep_in_text=True), [1, 2, 3, 4], None, "abc", 3, Ending(STOP, "bc", None, False)),
        (StopText(("a",)), [1, 2], None, "", 1, Ending(STOP, "a", by_worker=False)),
        (StopText(("a",), min_tokens=1), [1, 2, 1], None, "ab", 3, Ending(STOP, "a", by_worker=False)),
        (StopText(("cx",)), [1, 2, 3], LENGTH, "abc", 3, Ending(LENGTH)),
        (StopText(("abc",)), [1, 2, 3], LENGTH, "", 3, Ending(STOP, "abc", by_worker=False)),
    ],
)
def test_where_a_sequence_ends(
    stop: StopText,
    ids: list[int],
    last: generation_pb2.FinishReason | None,
    text: str,
    num_tokens: int,
    ending: Ending,
) -> None:
    for chunk in (1, 2, len(ids)):
        transcript = Transcript(Letters(), stop)
        made = tokens(ids, last)
        pieces = [transcript.push(made[begin : begin + chunk]) for begin in range(0, len(made), chunk)]
        assert "".join(piece.text for piece in pieces) == text
        assert sum(len(piece.token_ids) for piece in pieces) == num_tokens == len(transcript.token_ids)
        assert transcript.ending == ending


def test_drafts_are_counted_up_to_the_end_even_in_the_middle_of_a_step() -> None:
    steps = [
        [Token(0, 1), Token(1, 2, num_drafts=3, was_drafted=True), Token(2, 3)],  # one of three was right
        [Token(3, 1, num_drafts=4, was_drafted=True)]
        + [Token(position, position, was_drafted=True) for position in (4, 5, 6)]
        + [Token(7, 9)],
    ]
    transcript = Transcript(Letters(), StopText(("de",)))
    for step in steps:
        transcript.push(step)
    assert transcript.token_ids == [1, 2, 3, 1, 4, 5]
    assert (transcript.num_drafts, transcript.num_accepted_drafts) == (7, 4)
