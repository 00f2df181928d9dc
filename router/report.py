"""From a request's timeline to what its client is told of it."""

from __future__ import annotations

from pdserve.v1.errors import Internal
from router.attempt import Attempt
from router.fleet.worker import Worker
from router.outputs import Finished, Started, Timings, Usage
from router.request import Request, Timeline


def started(attempt: Attempt) -> Started:
    request = attempt.request
    return Started(
        index=request.plan.index,
        request_id=request.plan.request_id,
        prompt_token_ids=request.plan.prompt_token_ids,
        cached_tokens=_cached_tokens(request),
        prefill_worker=_id(attempt.prefill_worker),
        decode_worker=_id(attempt.decode_worker),
    )


def finished(attempt: Attempt) -> Finished:
    request = attempt.request
    ending = request.transcript.ending
    if ending is None:
        raise Internal("a request cannot be reported as finished before it ended")
    num_tokens = len(request.transcript.token_ids)
    usage = Usage(
        prompt_tokens=len(request.plan.prompt_token_ids),
        cached_tokens=_cached_tokens(request),
        completion_tokens=num_tokens,
        draft_tokens=request.transcript.num_drafts,
        accepted_draft_tokens=request.transcript.num_accepted_drafts,
    )
    timings = _timings(request.timeline, num_tokens)
    return Finished(
        index=request.plan.index,
        ending=ending,
        usage=usage,
        timings=timings,
        num_resumes=request.num_resumes,
        prefill_worker=_id(attempt.prefill_worker),
        decode_worker=_id(attempt.decode_worker),
    )


def _id(worker: Worker | None) -> str:
    return worker.info.id if worker is not None else ""


def _cached_tokens(request: Request) -> int:
    """The prefill worker's hit; of a resumed sequence, that of its first attempt."""
    report = request.timeline.report
    return 0 if report is None else report.cached_tokens


def _timings(timeline: Timeline, num_tokens: int) -> Timings:
    report, handover = timeline.report, timeline.handover
    first_at = timeline.first_token_at or timeline.received_at
    decode_ms = ((timeline.last_token_at or first_at) - first_at) * 1000
    sent_ms = ((timeline.prefill_begun_at or first_at) - timeline.received_at) * 1000
    return Timings(
        queue_ms=sent_ms + (report.queue_ms if report is not None else 0.0),
        prefill_ms=report.prefill_ms if report is not None else 0.0,
        transfer_ms=timeline.transfer_ms,
        transfer_bytes=timeline.transfer_bytes,
        ttft_ms=(first_at - timeline.received_at) * 1000,
        decode_ms=decode_ms,
        mean_itl_ms=decode_ms / (num_tokens - 1) if num_tokens > 1 else 0.0,
        handover_ms=handover.ready_ms if handover is not None else 0.0,
        decode_start_ms=handover.first_step_ms if handover is not None else 0.0,
        hidden_bytes=timeline.hidden_bytes,
        reserve_ms=_reserve_ms(timeline),
    )


def _reserve_ms(timeline: Timeline) -> float:
    if timeline.left_queue_at is None or timeline.prefill_begun_at is None:
        return 0.0
    return (timeline.prefill_begun_at - timeline.left_queue_at) * 1000
