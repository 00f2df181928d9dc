"""Is it alive, and would a request that came now be served?"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from router.router import Router


def routes(router: Router) -> list[BaseRoute]:
    async def live(request: Request) -> Response:
        """200 as long as the process answers at all."""
        return JSONResponse({"status": "live"})

    async def health(request: Request) -> Response:
        """200 while a request that came now could be served, else 503."""
        reason = router.table.reason_to_wait
        if reason is None:
            return JSONResponse({"status": "serving"})
        return JSONResponse({"status": "not_serving", "reason": reason}, 503, {"retry-after": "1"})

    return [Route("/live", live), Route("/health", health)]
