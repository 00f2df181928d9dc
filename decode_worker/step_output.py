"""One router's share of a step: out of the engine's outputs, and into the one message that tells it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from decode_worker.admission import Admissions
from decode_worker.record import DecodeRecord
from decode_worker.subscription import StepBatch, StepFailure, StepToken
from engine.request import SequenceOutput
from kv_transfer.frame import TransferKey
from kv_transfer.handover import HandOver
from pdserve.v1 import cluster_pb2, worker_pb2
from worker.messages import write_token
from worker.statuses import failure


def step_batches(
    outputs: Iterable[SequenceOutput],
    admissions: Admissions,
    started: Mapping[str, HandOver] | None = None,
) -> dict[str, StepBatch]:
    """By router. What has no admission is nobody's any more. `started`: those whose first step this was."""
    batches: dict[str, StepBatch] = {}
    for output in outputs:
        admission = admissions.get(output.sequence_id)
        if admission is None:
            continue
        handover = started.get(output.sequence_id) if started else None
        _record(admission.record, output, handover)
        batch = batches.get(admission.router_id)
        if batch is None:
            batch = batches[admission.router_id] = StepBatch()
        add_output(batch, admission.key, output, handover)
    return batches


def _record(record: DecodeRecord, output: SequenceOutput, handover: HandOver | None) -> None:
    record.num_tokens += len(output.new_tokens)
    if output.prefill is not None:
        record.prefilled(output.prefill)
    if handover is not None:
        record.handed_over(handover)


def add_output(
    batch: StepBatch, key: TransferKey, output: SequenceOutput, handover: HandOver | None = None
) -> None:
    """The finish reason goes with the last of its tokens, what was before them with the first."""
    if output.error is not None:
        batch.failures.append(StepFailure(key, failure(output)))
    prefill, num_drafts = output.prefill, output.num_drafts
    last = len(output.new_tokens) - 1
    for index, token in enumerate(output.new_tokens):
        reason = output.finish_reason if index == last else None
        batch.tokens.append(StepToken(key, token, reason, prefill, num_drafts, handover))
        prefill, num_drafts, handover = None, 0, None


def step_output(batch: StepBatch, load: cluster_pb2.WorkerLoad) -> worker_pb2.StepOutput:
    """Written in place: messages made one by one and copied in take four times as long."""
    message = worker_pb2.StepOutput(load=load)
    add = message.tokens.add
    for each in batch.tokens:
        write_token(add(), *each)
    for broken in batch.failures:
        message.failed.add(
            transfer_id=broken.key.transfer_id,
            epoch=broken.key.epoch,
            code=broken.error.code.value[0],
            message=broken.error.message,
            reason=broken.error.reason,
        )
    return message
