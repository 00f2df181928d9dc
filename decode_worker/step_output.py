"""One router's share of a step: out of the engine's outputs, and into the one message that tells it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from decode_worker.admission import Admissions
from decode_worker.subscription import StepBatch, StepFailure, StepToken
from engine.request import SequenceOutput
from kv_transfer.frame import TransferKey
from kv_transfer.handover import HandOver
from pdserve.v1 import cluster_pb2, worker_pb2
from pdserve.v1.errors import Internal
from worker.messages import write_token


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
        batch = batches.get(admission.router_id)
        if batch is None:
            batch = batches[admission.router_id] = StepBatch()
        add_output(batch, admission.key, output, started.get(output.sequence_id) if started else None)
    return batches


def add_output(
    batch: StepBatch, key: TransferKey, output: SequenceOutput, handover: HandOver | None = None
) -> None:
    """The finish reason goes with the last of its tokens, what was before them with the first."""
    if output.error is not None:
        error = Internal(f"{output.sequence_id}: {output.error}", reason="ENGINE_FAILED")
        batch.failures.append(StepFailure(key, error))
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
    for failure in batch.failures:
        message.failed.add(
            transfer_id=failure.key.transfer_id,
            epoch=failure.key.epoch,
            code=failure.error.code.value[0],
            message=failure.error.message,
        )
    return message
