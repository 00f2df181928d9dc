"""Over HTTP: OpenAI's 401 and 403, what is open, and TLS."""

from __future__ import annotations

import base64
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, AuthenticationError, PermissionDeniedError

from router.access import changes
from tests.certificates import Authority, Pair
from tests.integration.access.callers import Keys
from tests.integration.http.raw import get, post
from tests.integration.router.harness import Cluster, running

BODY = b'{"prompt": [1], "max_tokens": 3}'


@pytest_asyncio.fixture
async def cluster(model_dir: Path, keys: Keys) -> AsyncIterator[Cluster]:
    async with running(model_dir, http="127.0.0.1:0", **keys.settings) as cluster:
        yield cluster


def at(cluster: Cluster) -> str:
    assert cluster.server.http_address is not None
    return cluster.server.http_address


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_a_wrong_key_is_openais_401_and_a_right_one_without_permission_a_403(
    cluster: Cluster, keys: Keys
) -> None:
    for headers in ({}, bearer("wrong"), bearer(keys.user + "x"), {"authorization": keys.user}):
        answer = await post(at(cluster), "/v1/completions", BODY, headers)
        assert answer.status == 401
        assert answer.error["type"] == "invalid_request_error"
        assert answer.error["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == 'Bearer realm="pdserve"'
        assert keys.user not in json.dumps(answer.error)
    for key in (keys.admin, keys.scraper):
        answer = await post(at(cluster), "/v1/completions", BODY, bearer(key))
        assert (answer.status, answer.error["code"]) == (403, "permission_denied")
    assert (await post(at(cluster), "/v1/completions", BODY, bearer(keys.user))).status == 200
    assert len(cluster.p.prompts) == 1


async def test_openais_client_is_told_in_its_own_words(cluster: Cluster, keys: Keys) -> None:
    url = f"http://{at(cluster)}/v1"
    async with AsyncOpenAI(base_url=url, api_key="sk-wrong", max_retries=0) as client:
        with pytest.raises(AuthenticationError):
            await client.completions.create(model="tiny", prompt="x", max_tokens=3)
    async with AsyncOpenAI(base_url=url, api_key=keys.admin, max_retries=0) as client:
        with pytest.raises(PermissionDeniedError):
            await client.completions.create(model="tiny", prompt="x", max_tokens=3)
    async with AsyncOpenAI(base_url=url, api_key=keys.user, max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]
        await client.completions.create(model="tiny", prompt="x", max_tokens=3)


async def test_each_path_wants_what_it_shows(cluster: Cluster, keys: Keys) -> None:
    """In columns: without a key, and with that for generate, for admin, for metrics."""
    columns = (None, keys.user, keys.admin, keys.scraper)
    for path, statuses in {
        "/health": (200, 200, 200, 200),
        "/live": (200, 200, 200, 200),
        "/v1/models": (401, 200, 403, 403),
        "/v1/models/tiny": (401, 200, 403, 403),
        "/v1": (401, 404, 403, 403),
        "/metrics": (401, 200, 200, 200),
        "/": (401, 403, 200, 403),
        "/pdserve/app.js": (401, 403, 200, 403),
        "/pdserve/cluster": (401, 403, 200, 403),
        "/pdserve/requests": (401, 403, None, 403),
        "/nowhere": (401, 403, 404, 403),
        "//v1/models": (401, 403, 404, 403),
    }.items():
        for key, status in zip(columns, statuses, strict=True):
            if status is not None:
                answer = await get(at(cluster), path, {} if key is None else bearer(key))
                assert answer.status == status, (path, key)


async def test_a_browser_asks_its_user_for_the_key_as_a_password(cluster: Cluster, keys: Keys) -> None:
    refused = await get(at(cluster), "/")
    assert refused.headers["www-authenticate"] == 'Basic realm="pdserve"'
    password = base64.b64encode(f"me:{keys.admin}".encode()).decode()
    assert (await get(at(cluster), "/", {"authorization": f"Basic {password}"})).status == 200


async def test_a_refused_body_is_not_read(cluster: Cluster) -> None:
    answer = await post(at(cluster), "/v1/completions", BODY, {"content-length": str(1 << 20)})
    assert answer.status == 401


def context(ca: Path, client: Pair | None = None) -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=str(ca))
    if client is not None:
        made.load_cert_chain(client.cert, client.key)
    return made


async def asked(cluster: Cluster, tls: ssl.SSLContext | bool, key: str = "") -> int:
    async with aiohttp.ClientSession() as session:
        url = f"https://{at(cluster)}/v1/completions"
        asking = session.post(url, json={"prompt": [1], "max_tokens": 3}, headers=bearer(key), ssl=tls)
        async with asking as answer:
            return answer.status


async def test_https_and_mutual_tls(
    model_dir: Path, keys: Keys, pair: Pair, authority: Authority, tmp_path: Path
) -> None:
    ours, stranger = authority.issue("http-client"), Authority(tmp_path, "stranger")
    theirs = stranger.issue("http-client")
    tls = {"cert": pair.cert, "key": pair.key}
    async with running(model_dir, http="127.0.0.1:0", tls=tls, **keys.settings) as cluster:
        assert await asked(cluster, context(authority.cert), keys.user) == 200
        assert await asked(cluster, context(authority.cert)) == 401
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await asked(cluster, context(stranger.cert), keys.user)
    mutual = {**tls, "client_ca": authority.cert}
    async with running(model_dir, http="127.0.0.1:0", tls=mutual) as cluster:
        assert await asked(cluster, context(authority.cert, ours)) == 200
        for client in (None, theirs):
            with pytest.raises((aiohttp.ClientError, ssl.SSLError, ConnectionError)):
                await asked(cluster, context(authority.cert, client))


async def test_a_renewed_certificate_is_used_for_new_connections(
    model_dir: Path, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "_LOOK_EVERY_S", 0.0)
    renewed_by = Authority(tmp_path, "renewed")
    pair = Pair(tmp_path / "router.pem", tmp_path / "router.key")
    first, second = authority.issue("http-first"), renewed_by.issue("http-second")
    first.cert.replace(pair.cert)
    first.key.replace(pair.key)
    tls = {"cert": pair.cert, "key": pair.key}
    async with running(model_dir, http="127.0.0.1:0", tls=tls) as cluster:
        assert await asked(cluster, context(authority.cert)) == 200
        second.cert.replace(pair.cert)
        assert await asked(cluster, context(authority.cert)) == 200
        second.key.replace(pair.key)
        assert await asked(cluster, context(renewed_by.cert)) == 200
