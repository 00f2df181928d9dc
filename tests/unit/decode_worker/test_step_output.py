"""A step's outputs as the one message that each router gets of them."""

from __future__ import annotations

import asyncio

from decode_worker.admission import Admission, Admissions, Mode
from decode_worker.record import DecodeRecord
from decode_worker.step_output import add_output, step_batches, step_output
from decode_worker.subscription import StepBatch
from engine.request import NewToken, PrefillReport, SequenceOutput, SequenceRequest
from engine.sampling import FinishReason, SamplingParams, StopConditions
from kv_transfer.frame import TransferKey
from kv_transfer.handover import HandOver
from observability.origin import Origin
from observability.tracing import NO_TRACER
from pdserve.v1 import cluster_pb2, generation_pb2
from worker.record import Recorder

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


def test_the_times_of_a_hand_over_come_with_the_first_token_drawn_here() -> None:
    batch, handover = StepBatch(), HandOver(1.5, 2.5)
    tokens = (NewToken(1, 5, None, was_drafted=True), NewToken(2, 6, None))
    add_output(batch, KEY, SequenceOutput("a/0", 30, tokens, None, False), handover)
    assert [each.handover for each in batch.tokens] == [handover, None]
    first, second = step_output(batch, cluster_pb2.WorkerLoad()).tokens
    assert (first.handover.ready_ms, first.handover.first_step_ms) == (1.5, 2.5)
    assert not second.HasField("handover")


def test_a_chunk_that_is_not_the_last_says_nothing() -> None:
    batch = StepBatch()
    add_output(batch, KEY, SequenceOutput("a/0", 16, (), None, False))
    assert batch.is_empty


def output(sequence_id: str, token_id: int) -> SequenceOutput:
    return SequenceOutput(sequence_id, 8, (NewToken(2, token_id, None),), None, is_last=False)


async def test_each_router_gets_its_own_sequences_and_nobody_those_that_were_let_go() -> None:
    admissions = Admissions()
    for number, router_id in enumerate(("one", "two", "one")):
        key = TransferKey(f"t{number}", 1)
        request = SequenceRequest(str(key), (1,), (), SamplingParams(), StopConditions(9))
        granted = asyncio.get_running_loop().create_future()
        record = DecodeRecord(Recorder("d", NO_TRACER).record(key, Origin()))
        admissions.add(Admission(key, router_id, request, Mode.RECEIVE_KV, granted, record))
    outputs = [output(f"t{number}/1", 50 + number) for number in range(4)]
    batches = step_batches(outputs, admissions)
    told = {router_id: [t.token.token_id for t in batch.tokens] for router_id, batch in batches.items()}
    assert told == {"one": [50, 52], "two": [51]}


def test_the_message_holds_every_token_every_failure_and_the_load() -> None:
    batch = StepBatch()
    add_output(batch, KEY, SequenceOutput("a/0", 8, (NewToken(2, 7, None),), FinishReason.EOS, True))
    add_output(batch, TransferKey("b", 3), output("b/3", 0))
    add_output(batch, TransferKey("c", 1), SequenceOutput("c/1", 8, (), None, True, error="it broke"))
    message = step_output(batch, cluster_pb2.WorkerLoad(num_running=5))
    assert [(t.transfer_id, t.epoch, t.position, t.token_id) for t in message.tokens] == [
        ("a", 0, 2, 7),
        ("b", 3, 2, 0),
    ]
    reasons = [token.finish_reason for token in message.tokens]
    assert reasons == [generation_pb2.FINISH_REASON_EOS, generation_pb2.FINISH_REASON_UNSPECIFIED]
    assert [(failed.transfer_id, failed.epoch) for failed in message.failed] == [("c", 1)]
    assert "it broke" in message.failed[0].message
    assert message.load.num_running == 5
