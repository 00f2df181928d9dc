"""Which calls want which permission over gRPC, and what those get that lack it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health

from pdserve.v1 import cluster_pb2, generation_pb2
from pdserve.v1.errors import PdserveError
from router.access.gate import ANY, Gate
from router.access.keys import Permission
from router.front import wire

_HEALTH = health.SERVICE_NAME
_PERMISSIONS = {
    generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name: frozenset({Permission.GENERATE}),
    cluster_pb2.DESCRIPTOR.services_by_name["Admin"].full_name: frozenset({Permission.ADMIN}),
}


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg] # of any messages; not generic at run time
    """Health is everybody's; whatever else the server has wants some key at least."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[wire.Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> wire.Handler:
        service = handler_call_details.method.rpartition("/")[0].removeprefix("/")
        if service != _HEALTH:
            try:
                given = _authorization(handler_call_details.invocation_metadata)
                self._gate.check(given, _PERMISSIONS.get(service, ANY))
            except PdserveError as error:
                return _refusing(error)
        return await continuation(handler_call_details)


def _authorization(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    for name, value in metadata:
        if name == "authorization" and isinstance(value, str):
            return value
    return None


def _refusing(error: PdserveError) -> wire.Handler:
    """Of whatever kind the method is: ends before a message was read."""

    async def refuse(messages: object, context: wire.Context[Message, Message]) -> None:
        async with wire.answering(context):
            raise error

    return grpc.stream_stream_rpc_method_handler(refuse)
