"""A step's output for one sequence as the messages of its tokens."""

from __future__ import annotations

from decode_worker.publisher import add_output
from decode_worker.subscription import StepBatch
from engine.request import NewToken, PrefillReport, SequenceOutput
from engine.sampling import FinishReason
from kv_transfer.frame import TransferKey

KEY = TransferKey("a", 0)


def test_several_tokens_of_a_step_keep_their_order_and_only_the_last_one_ends_the_sequence() -> None:
    batch = StepBatch()
    tokens = tuple(NewToken(position, 50 + position, None, position < 6) for position in (4, 5, 6))
    add_output(batch, KEY, SequenceOutput("a/0", 30, tokens, FinishReason.STOP, True, num_drafts=5))
    assert [each.token for each in batch.tokens] == list(tokens)
    assert [each.finish_reason for each in batch.tokens] == [None, None, FinishReason.STOP]
    assert [each.num_drafts for each in batch.tokens] == [5, 0, 0]


def test_a_prefill_report_comes_with_the_first_token() -> None:
    batch = StepBatch()
    report = PrefillReport(0, 1.0, 2.0)
    add_output(batch, KEY, SequenceOutput("a/0", 30, (NewToken(0, 1, None),), None, False, report))
    assert [(each.prefill, each.finish_reason) for each in batch.tokens] == [(report, None)]


def test_a_chunk_that_is_not_the_last_says_nothing() -> None:
    batch = StepBatch()
    add_output(batch, KEY, SequenceOutput("a/0", 16, (), None, False))
    assert batch.is_empty
