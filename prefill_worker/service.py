"""The prefill role's RPC: protobuf on this side, plain values behind it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from engine.grammar import Grammar
from engine.request import SequenceRequest, Until
from kv_transfer.frame import TransferKey
from kv_transfer.transfer import PushTarget, TransferReport
from pdserve.v1 import cluster_pb2, worker_pb2, worker_pb2_grpc
from pdserve.v1.errors import InvalidArgument
from prefill_worker.prefill import FirstToken
from prefill_worker.record import recorded
from worker.messages import push_target, sequence_request, token_output
from worker.record import Recorder, origin_of_call
from worker.statuses import Writer, statuses


class Prefiller(Protocol):
    """What the RPC needs of the worker."""

    async def grammar(self, spec: worker_pb2.SequenceSpec) -> Grammar | None: ...

    def prefill(
        self, request: SequenceRequest, target: PushTarget
    ) -> AsyncGenerator[FirstToken | TransferReport, None]: ...

    def load(self) -> cluster_pb2.WorkerLoad: ...


class PrefillServicer(worker_pb2_grpc.PrefillWorkerServicer):
    def __init__(self, worker: Prefiller, recorder: Recorder) -> None:
        self._worker = worker
        self._recorder = recorder

    async def Prefill(  # type: ignore[override]  # the stubs know only handlers that yield
        self, request: worker_pb2.PrefillRequest, context: Writer[worker_pb2.PrefillResponse]
    ) -> None:
        async with statuses(context):
            grammar = await self._worker.grammar(request.sequence)
            sequence = sequence_request(request.sequence, Until.FIRST_TOKEN, True, grammar)
            target = push_target(request.reservation)
            if str(target.key) != sequence.sequence_id:
                raise InvalidArgument(f"{sequence.sequence_id} came with the reservation of {target.key}")
            record = self._recorder.record(target.key, origin_of_call(context))
            with recorded(record, sequence) as prefill:
                async with aclosing(self._worker.prefill(sequence, target)) as events:
                    async for event in events:
                        prefill.note(event)
                        await context.write(self._response(target.key, event))

    def _response(self, key: TransferKey, event: FirstToken | TransferReport) -> worker_pb2.PrefillResponse:
        load = self._worker.load()
        if isinstance(event, FirstToken):
            token = token_output(key, event.token, event.finish_reason, event.report)
            return worker_pb2.PrefillResponse(first_token=worker_pb2.FirstToken(token=token, load=load))
        return worker_pb2.PrefillResponse(
            transfer_end=worker_pb2.TransferEnd(
                transfer_ms=event.transfer_ms,
                transfer_bytes=event.transfer_bytes,
                num_blocks=event.num_blocks,
                hidden_bytes=event.hidden_bytes,
                load=load,
            )
        )
