"""The HTTP application: the routes of each feature, a module with `routes(router)`, side by side."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.middleware import Middleware

from router.access.gate import Gate
from router.http import health, openai_api
from router.http.connections import Connections
from router.http.errors import HANDLERS
from router.http.guard import Guard
from router.http.names import TrustedNames
from router.metrics import routes as metrics
from router.page import routes as page
from router.router import Router

FEATURES = (openai_api.routes, health.routes, metrics.routes, page.routes)


def make_app(router: Router, gate: Gate, connections: Connections, bound: str) -> Starlette:
    app = Starlette(
        routes=[route for routes in FEATURES for route in routes(router)],
        exception_handlers=HANDLERS,
        middleware=[
            Middleware(TrustedNames, bound=bound, names=router.config.http_hosts),
            Middleware(Guard, gate=gate),
        ],
    )
    app.state.connections = connections
    return app
