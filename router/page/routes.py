"""The page at the HTTP root, and the data that it shows: they tell of requests, never what is in them."""

from __future__ import annotations

from pathlib import Path

from google.protobuf.json_format import MessageToJson
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Route

from router.page.live import LiveRequests
from router.page.snapshots import Snapshots
from router.router import Router

_FOLDER = Path(__file__).parent / "static"
_FILES = {"/": "index.html", "/pdserve/app.js": "app.js", "/pdserve/style.css": "style.css"}
# Nothing from elsewhere: it must work offline, and what clients call their requests is not to be trusted.
_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


def routes(router: Router) -> list[BaseRoute]:
    snapshots = Snapshots(router)

    async def cluster(request: Request) -> Response:
        """The proto's ClusterSnapshot as JSON, with its names."""
        text = MessageToJson(
            await snapshots.read(),
            preserving_proto_field_name=True,
            always_print_fields_with_no_presence=True,
            indent=None,
        )
        return Response(text, media_type="application/json", headers={"cache-control": "no-store"})

    async def requests(request: Request) -> Response:
        return LiveRequests(request, router.recent)

    files: list[BaseRoute] = [_file(path, name) for path, name in _FILES.items()]
    return [*files, Route("/pdserve/cluster", cluster), Route("/pdserve/requests", requests)]


def _file(path: str, name: str) -> Route:
    async def file(request: Request) -> Response:
        return FileResponse(_FOLDER / name, headers=_HEADERS)

    return Route(path, file, name=name)
