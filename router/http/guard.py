"""Which paths want which permission, and the 401 or 403 of those that lack it."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from pdserve.v1.errors import PdserveError, Unauthenticated
from router.access.gate import ANY, Gate
from router.access.keys import Permission
from router.http.errors import error_response

_OPEN = ("/health", "/live")
_GENERATE = frozenset({Permission.GENERATE})
_ADMIN = frozenset({Permission.ADMIN})


class Guard:
    """ASGI middleware. Nothing of a body has been read when a call is refused."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = str(scope["path"])
        wanted = permissions_of(path)
        try:
            if wanted is not None:
                self._gate.check(Headers(scope=scope).get("authorization"), wanted)
        except PdserveError as error:
            answer = error_response(error)
            if isinstance(error, Unauthenticated):
                # A browser that opens the page asks its user for the key, as a password.
                scheme = "Basic" if wanted is _ADMIN else "Bearer"
                answer.headers["www-authenticate"] = f'{scheme} realm="pdserve"'
            await answer(scope, receive, send)
            return
        await self._app(scope, receive, send)


def permissions_of(path: str) -> frozenset[Permission] | None:
    """None: it is everybody's. What tells of the cluster, the page and its data, is for its operators."""
    if path in _OPEN:
        return None
    if path == "/v1" or path.startswith("/v1/"):
        return _GENERATE
    return ANY if path == "/metrics" else _ADMIN
