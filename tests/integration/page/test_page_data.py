"""The page's files, and the data behind it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from router.events import Moment
from router.page import live
from router.recent.timeline import Mark, Timeline
from tests.integration.http.raw import get, post
from tests.integration.router.harness import Cluster, running, until

SECRET = "the words of a prompt"


@pytest_asyncio.fixture
async def cluster(model_dir: Path) -> AsyncIterator[Cluster]:
    async with running(model_dir, http="127.0.0.1:0") as cluster:
        yield cluster


def address(cluster: Cluster) -> str:
    return str(cluster.server.http_address)


async def events(cluster: Cluster, query: str = "") -> AsyncIterator[dict]:  # type: ignore[type-arg]
    timeout = aiohttp.ClientTimeout(sock_read=20)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.get(f"http://{address(cluster)}/pdserve/requests{query}") as response,
    ):
        assert response.content_type == "text/event-stream"
        async for line in response.content:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])


@pytest.mark.parametrize(
    ("path", "kind", "has"),
    [
        ("/", "text/html", b"<title>pdserve</title>"),
        ("/pdserve/app.js", "text/javascript", b"followCluster"),
        ("/pdserve/style.css", "text/css", b"--prefill"),
    ],
)
async def test_the_files_come_with_a_policy_that_lets_nothing_else_in(
    cluster: Cluster, path: str, kind: str, has: bytes
) -> None:
    answer = await get(address(cluster), path)
    assert answer.status == 200
    assert answer.headers["content-type"].startswith(kind)
    assert answer.headers["content-security-policy"].startswith("default-src 'self'")
    assert has in answer.body
    namespace = b"http://www.w3.org/2000/svg"
    assert re.findall(rb"[:\"'`(]//", answer.body.replace(namespace, b"")) == []


async def test_the_snapshot_is_the_controllers_with_the_routers_own_load(cluster: Cluster) -> None:
    told = (await get(address(cluster), "/pdserve/cluster")).json
    assert told["name"] == "test"
    assert [pool["role"] for pool in told["pools"]] == ["ROLE_PREFILL", "ROLE_DECODE"]
    (worker,) = told["pools"][0]["workers"]
    assert (worker["id"], worker["state"]) == ("prefill-0", "WORKER_STATE_READY")
    assert told["router"]["num_running"] == 0


async def test_a_controller_that_is_gone_is_an_error_and_old_news_are_not_shown(cluster: Cluster) -> None:
    assert (await get(address(cluster), "/pdserve/cluster")).status == 200
    await cluster.control.stop()
    await asyncio.sleep(0.6)  # what a snapshot counts as fresh
    answer = await get(address(cluster), "/pdserve/cluster")
    assert answer.status == 503
    assert "controller" in str(answer.error["message"])
    await cluster.control.start()


async def test_requests_are_told_as_they_happen_without_what_is_in_them(cluster: Cluster) -> None:
    cluster.d.step_s = 0.05
    stream = events(cluster)
    first = await anext(stream)
    assert first["requests"] == []
    body = json.dumps({"prompt": SECRET, "max_tokens": 20, "request_id": "mine"}).encode()
    asked = asyncio.ensure_future(post(address(cluster), "/v1/completions", body))
    at_ms: list[float] = []
    num_tokens, last = 0, {}
    async for event in stream:
        assert SECRET not in json.dumps(event)
        for timeline in event["requests"]:
            tokens = timeline["tokens"]
            assert tokens["start"] == len(at_ms)  # only what is new
            at_ms += tokens["at_ms"]
            num_tokens += sum(tokens["counts"])
            last = timeline
        if last.get("outcome"):
            break
    await stream.aclose()
    assert (await asked).status == 200
    assert (last["request_id"], last["outcome"]) == ("mine", "FINISH_REASON_LENGTH")
    assert num_tokens == last["output_tokens"] == 20
    assert at_ms == sorted(at_ms)
    assert last["timings"]["ttft_ms"] > 0
    assert {"prefill-0", "decode-0"} <= {mark["worker"] for mark in last["marks"]}


async def test_a_request_that_is_named_is_told_of_to_its_end_whatever_comes_after_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "MAX_SHOWN", 3)
    cluster.d.step_s = 0.02
    stream = events(cluster, "?request_id=mine")
    await anext(stream)
    asked = asyncio.ensure_future(cluster.client.generate([1], max_tokens=50, request_id="mine"))
    await until(lambda: cluster.p.num_prefills == 1)
    for _ in range(6):
        await cluster.client.generate([1], max_tokens=1)
    num_tokens = 0
    async for event in stream:
        mine = [each for each in event["requests"] if each["request_id"] == "mine"]
        num_tokens += sum(count for each in mine for count in each["tokens"]["counts"])
        if mine and mine[0]["outcome"]:
            break
    await stream.aclose()
    assert num_tokens == len((await asked).token_ids) == 50


async def test_who_looks_is_forgotten_when_gone(cluster: Cluster) -> None:
    stream = events(cluster)
    await anext(stream)
    assert len(cluster.router.recent._watches) == 1
    await stream.aclose()
    await until(lambda: not cluster.router.recent._watches)


async def test_a_silent_stream_is_kept_alive(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_SILENCE_S", 0.1)
    told = live.events(cluster.router.recent)
    assert (await anext(told)).startswith("data: ")
    assert await anext(told) == ": nothing new\n\n"
    await told.aclose()


async def test_an_open_page_does_not_keep_the_router_from_leaving(cluster: Cluster) -> None:
    stream = events(cluster)
    await anext(stream)
    await asyncio.wait_for(cluster.server.drain(60.0), 20)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_a_page_that_reads_no_more_does_not_keep_the_router_from_leaving(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a laptop that was closed."""
    monkeypatch.setattr(live, "MAX_SHOWN", 1000)
    timeline = Timeline("0", "0", 0, 5, 0.0, 0.0, marks=[Mark(Moment.RECEIVED, None, 0.0)])
    timeline.tokens.at_ms.extend(range(4096))
    timeline.tokens.counts.extend([1] * 4096)
    for number in range(1000):  # far more than sockets keep
        cluster.router.recent._running[str(number)] = replace(timeline, id=str(number))
    host, _, port = address(cluster).rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), limit=1024)
    writer.write(f"GET /pdserve/requests HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    connections = cluster.server._http._server.server_state.connections  # type: ignore[union-attr]
    await until(lambda: any(each.flow.write_paused for each in connections))  # type: ignore[union-attr]
    await asyncio.wait_for(cluster.server.drain(60.0), 20)
    writer.close()
