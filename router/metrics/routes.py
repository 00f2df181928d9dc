"""`GET /metrics`."""

from __future__ import annotations

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from router.router import Router


def routes(router: Router) -> list[BaseRoute]:
    async def metrics(request: Request) -> Response:
        text = await router.metrics.exposition()
        return Response(text, headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    return [Route("/metrics", metrics)]
