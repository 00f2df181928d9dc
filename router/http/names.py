"""Under which names the router answers a browser.

Somebody else's page may give its own name our address, and is then of the same origin as what it asks: so
what listens on loopback answers to loopback's names, to addresses, and to names that the settings have. A
page of another origin is refused whatever it sends.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from router.bind import is_loopback


class TrustedNames:
    """ASGI middleware. `bound` is the host that the server is bound to."""

    def __init__(self, app: ASGIApp, bound: str, names: Sequence[str]) -> None:
        self._app = app
        self._names = {"localhost", *(name.lower() for name in names)}
        self._is_any = not names and not is_loopback(bound)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_ours(host):
            answer = _forbidden(f"the host {host!r} is not in router.http_hosts", "host_not_allowed")
        elif origin is not None and not self._is_same(origin, host):
            answer = _forbidden(f"pages of {origin!r} may not ask here", "origin_not_allowed")
        else:
            await self._app(scope, receive, send)
            return
        await answer(scope, receive, send)

    def _is_ours(self, host: str) -> bool:
        # Without one it is no browser.
        return self._is_any or host == "" or self._is_named(_name_of(f"//{host}"))

    def _is_same(self, origin: str, host: str) -> bool:
        """A proxy may have changed the host: then the settings know the page's name."""
        name = _name_of(origin)
        return name is not None and (
            origin.partition("://")[2].lower() == host.lower() or name in self._names - {"localhost"}
        )

    def _is_named(self, name: str | None) -> bool:
        return name is not None and (name in self._names or _is_address(name))


def _name_of(url: str) -> str | None:
    """In lower case, without port and brackets."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _forbidden(message: str, code: str) -> JSONResponse:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return JSONResponse({"error": error}, 403)
