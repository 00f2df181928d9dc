"""The page in a real browser."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from starlette.requests import Request

from pdserve.v1.cluster_pb2 import ClusterSnapshot
from pdserve.v1.errors import Unavailable
from router.page import live, routes
from router.page.live import LiveRequests
from router.page.snapshots import Snapshots
from router.recent import timeline
from router.recent.recent import Recent
from tests.browser import browsing, find_browser
from tests.integration.router.harness import Cluster, running, until
from tests.scripted_workers import MAX_SEQUENCE_TOKENS

pytestmark = [
    pytest.mark.skipif(
        find_browser() is None, reason="there is no chromium here (Debian: apt install chromium)"
    ),
    pytest.mark.timeout(240),
]


@pytest_asyncio.fixture
async def cluster(model_dir: Path) -> AsyncIterator[Cluster]:
    async with running(model_dir, http="127.0.0.1:0", num_decodes=2) as cluster:
        yield cluster


def text_of(id: str) -> str:
    return f"document.getElementById('{id}').textContent"


async def test_pools_requests_and_phases_are_shown_and_a_prompt_can_be_sent(cluster: Cluster) -> None:
    for decode in cluster.decodes:
        decode.step_s = 0.02
    url = f"http://{cluster.server.http_address}/"
    async with browsing(url) as page:
        await page.until("document.querySelectorAll('.worker').length === 3")
        assert await page.value(text_of("link")) == "live"
        assert await page.value("[...document.querySelectorAll('.worker')].map((w) => w.dataset.worker)") == [
            "prefill-0",
            "decode-0",
            "decode-1",
        ]
        assert await page.value("document.getElementById('none').hidden") is False
        # A request from elsewhere, with a name that would be trouble if it were taken for HTML.
        name = "<img src=x onerror=document.title='hacked'>"
        await cluster.client.generate([1, 2, 3], max_tokens=12, request_id=name)
        await page.until("document.querySelectorAll('#requests .row').length === 1")
        await page.until("document.querySelector('#requests .row').dataset.how === 'at its limit'")
        assert await page.value("document.querySelector('#requests .row').dataset.request") == name
        assert await page.value("document.title") == "pdserve"
        drawn = "[...document.querySelectorAll('#requests [data-phase]')].map((box) => box.dataset.phase)"
        phases = await page.value(drawn)
        assert isinstance(phases, list)
        assert {"queue", "prefill", "decode"} <= set(phases)
        strokes = await page.value("document.querySelector('#requests .tokens').getAttribute('d')")
        assert str(strokes).count("M") >= 5
        # And one from the box.
        await page.value("document.getElementById('max-tokens').value = 9")
        await page.value("document.getElementById('send').click()")
        await page.until("!document.getElementById('told').hidden")
        assert len(str(await page.value(text_of("answer")))) == 9
        assert "then made 8 more tokens" in str(await page.value(text_of("told")))
        assert await page.value("document.querySelectorAll('#own .row').length") == 1
        await page.until("document.querySelectorAll('#requests .row').length === 2")
        assert page.complaints == []
        assert (await page.screenshot()).startswith(b"\x89PNG")


async def test_the_decode_of_an_answer_of_many_tokens_is_drawn_to_its_end(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "MAX_DELIVERIES", 5)
    for decode in cluster.decodes:
        decode.step_s = 0.02
    async with browsing(f"http://{cluster.server.http_address}/") as page:
        answer = await cluster.client.generate([1, 2, 3], max_tokens=40)
        await page.until("document.querySelector('#requests .row')?.dataset.how === 'at its limit'")
        told = await page.value("document.querySelector('#requests [data-phase=decode]').textContent")
        assert told == f"decode: {await page.value(f'duration({answer.timings.decode_ms})')}"


async def test_the_own_prompt_is_explained_however_many_come_after_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "MAX_SHOWN", 3)
    for decode in cluster.decodes:
        decode.step_s = 0.05
    async with browsing(f"http://{cluster.server.http_address}/") as page:
        await page.value("document.getElementById('max-tokens').value = 40")
        await page.value("document.getElementById('send').click()")
        await page.until(f"{text_of('answer')}.length > 0")
        for _ in range(6):
            await cluster.client.generate([1], max_tokens=1)
        await page.until("!document.getElementById('told').hidden")
        assert await page.value("document.querySelector('#own .row').dataset.how") == "at its limit"


async def test_what_was_lost_before_the_first_token_is_left_out_of_the_picture(cluster: Cluster) -> None:
    marks = [["PREFILL_BEGIN", 10], ["PREFILL_BEGIN", 5300], ["FIRST_TOKEN", 6500], ["FINISHED", 7000]]
    resumed = {
        "num_resumes": 1,
        "marks": [{"moment": moment, "at_ms": at_ms} for moment, at_ms in marks],
        "tokens": {"at_ms": [6500, 6900]},
        "timings": {"queue_ms": 10, "prefill_ms": 1200, "decode_ms": 400, "transfer_bytes": 0},
    }
    async with browsing(f"http://{cluster.server.http_address}/") as page:
        drawn = f"phases({json.dumps(resumed)}, 0)"
        assert await page.value(f"{drawn}.queue") == [0, 10]
        assert await page.value(f"{drawn}.prefill") == [5300, 6500]


async def test_stopping_cancels_and_refusals_are_shown(cluster: Cluster) -> None:
    for decode in cluster.decodes:
        decode.step_s = 0.05
    async with browsing(f"http://{cluster.server.http_address}/") as page:
        await page.until("document.querySelectorAll('.worker').length === 3")
        await page.value("document.getElementById('max-tokens').value = 300")
        await page.value("document.getElementById('send').click()")
        await page.until(f"{text_of('answer')}.length > 2")
        await page.until("document.querySelector('#requests .row')?.classList.contains('running')")
        await page.value("document.getElementById('stop').click()")
        await page.until("document.querySelector('#requests .row').dataset.how === 'cancelled'")
        await until(cluster.is_idle)
        # The prompt takes some of the tokens: that refusal is the router's.
        await page.value(f"document.getElementById('max-tokens').value = {MAX_SEQUENCE_TOKENS}")
        await page.value("document.getElementById('send').click()")
        await page.until("document.getElementById('answer').className === 'failed'")
        assert "max_tokens" in str(await page.value(text_of("answer")))


@pytest.mark.parametrize("value", ["", "0", "1.5", str(MAX_SEQUENCE_TOKENS + 1)])
async def test_a_number_of_tokens_that_cannot_be_is_refused_in_words(cluster: Cluster, value: str) -> None:
    async with browsing(f"http://{cluster.server.http_address}/") as page:
        await page.until(f"document.getElementById('max-tokens').max === '{MAX_SEQUENCE_TOKENS}'")
        await page.value(f"document.getElementById('max-tokens').value = '{value}'")
        await page.value("document.getElementById('send').click()")
        await page.until("document.getElementById('answer').className === 'failed'")
        told = f"takes a whole number from 1 to {MAX_SEQUENCE_TOKENS}, which is what prompt and answer"
        assert told in str(await page.value(text_of("answer")))
        assert await page.value("document.getElementById('answer').hidden") is False
        # And one that can be is sent.
        await page.value("document.getElementById('max-tokens').value = '3'")
        await page.value("document.getElementById('send').click()")
        await page.until("!document.getElementById('told').hidden")
        assert len(str(await page.value(text_of("answer")))) == 3


async def test_a_router_that_comes_back_begins_anew(cluster: Cluster) -> None:
    async with browsing(f"http://{cluster.server.http_address}/") as page:
        await cluster.client.generate([1], max_tokens=2)
        await page.until("document.querySelectorAll('#requests .row').length === 1")
        recent = cluster.router.recent
        recent._ended.clear()
        for connection in tuple(cluster.server._http._connections._open):  # type: ignore[union-attr]
            connection.end(Unavailable("the router stops"))
        await page.until("document.querySelectorAll('#requests .row').length === 0")


async def test_the_requests_are_asked_for_again_where_an_error_came(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_refused = 0

    def refuse_twice(request: Request, recent: Recent) -> LiveRequests:
        nonlocal num_refused
        if num_refused == 2:
            return LiveRequests(request, recent)
        num_refused += 1
        raise Unavailable("the router is away")

    monkeypatch.setattr(routes, "LiveRequests", refuse_twice)
    async with browsing(f"http://{cluster.server.http_address}/") as page:
        await cluster.client.generate([1], max_tokens=2)
        await page.until("document.querySelectorAll('#requests .row').length === 1")
    assert num_refused == 2


async def test_a_tab_that_nobody_looks_at_keeps_no_connection(cluster: Cluster) -> None:
    def look(is_hidden: str) -> str:
        hide = f"Object.defineProperty(document, 'hidden', {{value: {is_hidden}, configurable: true}})"
        return f"{hide}; document.dispatchEvent(new Event('visibilitychange'))"

    watches = cluster.router.recent._watches
    async with browsing(f"http://{cluster.server.http_address}/") as page:
        await until(lambda: len(watches) == 1)
        await page.value(look("true"))
        await until(lambda: not watches)
        await cluster.client.generate([1], max_tokens=2)
        await page.value(look("false"))
        await page.until("document.querySelectorAll('#requests .row').length === 1")


async def test_a_router_that_hangs_is_said(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = asyncio.Event()

    async def hang(snapshots: Snapshots) -> ClusterSnapshot:
        await goes_on.wait()
        raise Unavailable("the test is over")

    async with browsing(f"http://{cluster.server.http_address}/") as page:
        await page.until(f"{text_of('link')} === 'live'")
        soon = "const after = AbortSignal.timeout.bind(AbortSignal); AbortSignal.timeout = () => after(300)"
        await page.value(f"(() => {{ {soon}; }})()")
        monkeypatch.setattr(Snapshots, "read", hang)
        await page.until(f"{text_of('link')} === 'the router does not answer'")
        goes_on.set()


async def test_a_controller_that_is_lost_is_said_and_found_again(cluster: Cluster) -> None:
    async with browsing(f"http://{cluster.server.http_address}/") as page:
        await page.until(f"{text_of('link')} === 'live'")
        await cluster.control.stop()
        await page.until(f"{text_of('link')}.includes('controller')")
        await cluster.control.start()
        await page.until(f"{text_of('link')} === 'live'")
