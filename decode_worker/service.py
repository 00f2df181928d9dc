"""The decode role's RPCs: protobuf on this side, plain values behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from decode_worker.admission import Mode
from decode_worker.step_output import step_output
from decode_worker.subscription import Subscription
from engine.grammar import Grammar
from engine.request import SequenceRequest
from kv_transfer.frame import TransferKey
from kv_transfer.transfer import PushTarget
from observability.origin import Origin
from pdserve.v1 import cluster_pb2, worker_pb2, worker_pb2_grpc
from pdserve.v1.errors import InvalidArgument
from worker.messages import reservation_message, sequence_request, transfer_key
from worker.record import origin_of_call
from worker.statuses import Writer, statuses

_MODES = {
    worker_pb2.ReserveRequest.MODE_RECEIVE_KV: Mode.RECEIVE_KV,
    worker_pb2.ReserveRequest.MODE_PREFILL_HERE: Mode.PREFILL_HERE,
}


class Decoder(Protocol):
    """What the RPCs need of the worker."""

    async def grammar(self, spec: worker_pb2.SequenceSpec) -> Grammar | None: ...

    async def reserve(
        self, key: TransferKey, router_id: str, request: SequenceRequest, mode: Mode, origin: Origin
    ) -> PushTarget | None: ...

    def release(self, keys: Sequence[TransferKey]) -> int: ...

    def subscribe(self, router_id: str) -> Subscription: ...

    def unsubscribe(self, subscription: Subscription) -> None: ...

    def load(self) -> cluster_pb2.WorkerLoad: ...


class DecodeServicer(worker_pb2_grpc.DecodeWorkerServicer):
    def __init__(self, worker: Decoder) -> None:
        self._worker = worker

    async def Reserve(
        self, request: worker_pb2.ReserveRequest, context: object
    ) -> worker_pb2.ReserveResponse:
        response = worker_pb2.ReserveResponse()
        async with statuses(context):
            mode = _MODES.get(request.mode)
            if mode is None:
                raise InvalidArgument("a Reserve needs a mode")
            grammar = await self._worker.grammar(request.sequence)
            sequence = sequence_request(request.sequence, grammar=grammar)
            key = transfer_key(request.sequence.transfer_id, request.sequence.epoch)
            origin = origin_of_call(context)
            target = await self._worker.reserve(key, request.router_id, sequence, mode, origin)
            if target is not None:
                response.reservation.CopyFrom(reservation_message(target))
            response.load.CopyFrom(self._worker.load())
        return response

    async def Release(
        self, request: worker_pb2.ReleaseRequest, context: object
    ) -> worker_pb2.ReleaseResponse:
        response = worker_pb2.ReleaseResponse()
        async with statuses(context):
            keys = [transfer_key(key.transfer_id, key.epoch) for key in request.keys]
            response.num_released = self._worker.release(keys)
        return response

    async def Subscribe(  # type: ignore[override]  # the stubs know only handlers that yield
        self, request: worker_pb2.SubscribeRequest, context: Writer[worker_pb2.StepOutput]
    ) -> None:
        async with statuses(context):
            if not request.router_id:
                raise InvalidArgument("a subscription needs a router_id")
            subscription = self._worker.subscribe(request.router_id)
            try:
                await subscription.deliver(
                    lambda batch: context.write(step_output(batch, self._worker.load()))
                )
            finally:
                self._worker.unsubscribe(subscription)
