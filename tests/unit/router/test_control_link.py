"""What the controller says of a call is handed on; only its silence is the router's to tell."""

from __future__ import annotations

import grpc
import pytest

from pdserve.v1 import cluster_pb2 as pb
from pdserve.v1.errors import PdserveError, Unavailable, to_status
from router.fleet.control import ControlLink
from tests.static_control import StaticControl
from tests.trusted import TRUST

STAYS = Unavailable("router-0 stays: the port is taken", reason="CANNOT_START")


class Refusing(StaticControl):
    async def RestartRouter(
        self, request: pb.RestartRouterRequest, context: grpc.aio.ServicerContext
    ) -> pb.ClusterSnapshot:
        await context.abort_with_status(to_status(STAYS))
        raise STAYS


async def refusal(link: ControlLink) -> PdserveError:
    with pytest.raises(PdserveError) as refused:
        await link.ask(lambda to: to.RestartRouter, pb.RestartRouterRequest(router_id="router-0"))
    return refused.value


async def test_why_a_router_stays_is_told_in_the_controllers_own_words() -> None:
    async with Refusing() as control:
        link = ControlLink(TRUST, control.address, None)
        told = await refusal(link)
        await link.close()
    assert (type(told), told.reason, told.message) == (Unavailable, STAYS.reason, STAYS.message)


async def test_a_controller_that_is_gone_is_told_as_lost() -> None:
    async with Refusing() as control:
        link = ControlLink(TRUST, control.address, None)
    told = await refusal(link)
    await link.close()
    assert (type(told), told.reason) == (Unavailable, "CONTROLLER_LOST")
