"""Reads one Prefill call: the first token, then the end of the transfer. All of it goes to the attempt."""

from __future__ import annotations

import grpc

from pdserve.v1 import worker_pb2
from pdserve.v1.errors import PdserveError, Unavailable, from_rpc_error
from router.attempt import Attempt
from router.events import Moment
from router.fleet.parsed import parsed
from router.fleet.worker import Worker
from router.tokens import token_of


async def read_prefill(attempt: Attempt, worker: Worker) -> None:
    """Cancelling this cancels the call, and with it whatever the worker does for the attempt."""
    inbox = attempt.inbox
    request = worker_pb2.PrefillRequest(sequence=attempt.spec(), reservation=attempt.reservation)
    call = worker.prefill(request, attempt.metadata)
    worker.holdings.prefilling[attempt.key] = inbox
    try:
        is_whole = False
        async for response in call:
            is_whole = _take(attempt, worker, parsed(response))
        if not is_whole:
            inbox.fail_prefill(Unavailable(f"worker {worker.info.id} ended its answer early"))
    except grpc.aio.AioRpcError as error:
        inbox.fail_prefill(_named(worker, from_rpc_error(error)))
    except PdserveError as error:
        inbox.fail_prefill(_named(worker, error))
    finally:
        call.cancel()
        worker.holdings.prefilling.pop(attempt.key, None)
        worker.holdings.discharge(attempt.key)
        inbox.prefill_ended()


def _take(attempt: Attempt, worker: Worker, response: worker_pb2.PrefillResponse) -> bool:
    """Whether the answer is whole with this part."""
    request = attempt.request
    if response.HasField("first_token"):
        first = response.first_token
        token = token_of(first.token)
        worker.holdings.discharge(attempt.key)
        worker.note_load(first.load)
        request.tell(Moment.PREFILL_END, worker.info.id)
        attempt.inbox.put_prefill(token)
        return token.finish_reason is not None
    end = response.transfer_end
    worker.note_load(end.load)
    request.timeline.transfer_ms += end.transfer_ms
    request.timeline.transfer_bytes += end.transfer_bytes
    request.timeline.hidden_bytes += end.hidden_bytes
    request.tell(Moment.TRANSFER_END, worker.info.id)
    return True


def _named(worker: Worker, error: PdserveError) -> PdserveError:
    message = f"worker {worker.info.id}: {error.message}"
    return type(error)(message, reason=error.reason, retry_after_s=error.retry_after_s)
