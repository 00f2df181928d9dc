"""Pages of others: neither a name that leads here nor their own origin lets them ask."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from starlette.responses import PlainTextResponse
from starlette.types import Message

from router.http.names import TrustedNames
from tests.integration.http.raw import post
from tests.integration.router.harness import Cluster, running

BODY = b'{"prompt": [1], "max_tokens": 1}'


@pytest_asyncio.fixture
async def cluster(model_dir: Path) -> AsyncIterator[Cluster]:
    async with running(model_dir, http="127.0.0.1:0", http_hosts=["Pd.example.org"]) as cluster:
        yield cluster


TAKEN = [
    {"host": "localhost:8000"},
    {"host": "127.0.0.1:8000"},
    {"host": "[::1]:8000"},
    {"host": "10.0.0.7"},
    {"host": "pd.example.org"},
    {"host": "localhost:8000", "origin": "http://localhost:8000"},
    {"host": "[::1]:8000", "origin": "http://[::1]:8000"},
    {"host": "127.0.0.1:8000", "origin": "https://PD.example.org"},
]
REFUSED = [
    ({"host": "evil.example"}, "host_not_allowed"),
    ({"host": "localhost.evil.example:8000"}, "host_not_allowed"),
    ({"host": "127.0.0.1.evil.example"}, "host_not_allowed"),
    ({"host": "user@evil.example"}, "host_not_allowed"),
    ({"host": "[::1"}, "host_not_allowed"),
    ({"host": "evil.example", "origin": "http://evil.example"}, "host_not_allowed"),
    ({"host": "localhost:8000", "origin": "http://evil.example"}, "origin_not_allowed"),
    ({"host": "localhost:8000", "origin": "http://localhost:9000"}, "origin_not_allowed"),
    ({"host": "localhost:8000", "origin": "null"}, "origin_not_allowed"),
]


@pytest.mark.parametrize("headers", TAKEN)
async def test_our_own_names_are_answered(cluster: Cluster, headers: dict[str, str]) -> None:
    assert cluster.server.http_address is not None
    answer = await post(cluster.server.http_address, "/v1/completions", BODY, headers)
    assert answer.status == 200


@pytest.mark.parametrize(("headers", "code"), REFUSED)
async def test_names_and_pages_of_others_are_a_403(
    cluster: Cluster, headers: dict[str, str], code: str
) -> None:
    assert cluster.server.http_address is not None
    answer = await post(cluster.server.http_address, "/v1/completions", BODY, headers)
    assert (answer.status, answer.error["code"]) == (403, code)


@pytest.mark.parametrize(
    ("bound", "names", "status"),
    [("127.0.0.1", (), 403), ("[::1]", (), 403), ("0.0.0.0", (), 200), ("0.0.0.0", ("a.example",), 403)],
)
async def test_beyond_loopback_any_name_is_taken_until_some_are_named(
    bound: str, names: tuple[str, ...], status: int
) -> None:
    told: list[Message] = []

    async def send(message: Message) -> None:
        told.append(message)

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    app = TrustedNames(PlainTextResponse("ok"), bound, names)
    await app({"type": "http", "method": "GET", "headers": [(b"host", b"b.example")]}, receive, send)
    assert told[0]["status"] == status
