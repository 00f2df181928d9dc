"""`grpc.health.v1` as everybody may ask it. Who watches names a service, and the name is kept for as long: so
it is a short one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpc_health.v1 import health_pb2

from router.front import wire

if TYPE_CHECKING:
    from grpc_health.v1._async import HealthServicer

_MAX_BYTES = 1 << 10


def health_handlers(servicer: HealthServicer) -> wire.Handlers:
    request = health_pb2.HealthCheckRequest
    return {
        "Check": wire.unary(request, servicer.Check, _MAX_BYTES),
        "Watch": wire.server_stream(request, servicer.Watch, _MAX_BYTES),
    }
