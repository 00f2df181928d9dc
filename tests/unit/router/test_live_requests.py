"""What an open page is told of the requests, and that it is let go."""

from __future__ import annotations

import asyncio
import json

import pytest

from pdserve.v1.errors import Cancelled
from router.events import Moment
from router.interruption import Interruption
from router.page import live
from router.recent.recent import Recent
from router.recent.timeline import Mark, Timeline


@pytest.mark.parametrize("num_turns", range(5))
async def test_a_page_that_goes_as_something_happens_is_let_go(
    monkeypatch: pytest.MonkeyPatch, num_turns: int
) -> None:
    """The loop's turns between a change and the closing of the page."""
    monkeypatch.setattr(live, "_PAUSE_S", 0.0)
    recent, work = Recent(), Interruption()

    async def follow() -> None:
        with work:
            async for _ in live.events(recent):
                pass

    page = asyncio.create_task(follow())
    for _ in range(10):  # it waits for a change
        await asyncio.sleep(0)
    for watch in recent._watches:
        watch.set()
    for _ in range(num_turns):
        await asyncio.sleep(0)
    work.end(Cancelled("the client closed the connection"))
    await asyncio.wait({page}, timeout=5)
    assert page.done()
    assert isinstance(page.exception(), Cancelled)


async def test_a_page_that_opens_is_told_of_long_answers_one_by_one() -> None:
    recent = Recent()
    for number in range(4):
        timeline = Timeline(str(number), str(number), 0, 5, float(number), float(number))
        timeline.marks.append(Mark(Moment.RECEIVED, None, 0.0))
        for at_ms in range(600):
            timeline.tokens.add(float(at_ms), 1)
        recent._running[timeline.id] = timeline
    told = live.events(recent)
    for number in (3, 2, 1, 0):
        event = json.loads((await anext(told)).removeprefix("data: "))
        assert [(each["id"], len(each["tokens"]["at_ms"])) for each in event["requests"]] == [
            (str(number), 600)
        ]
    await told.aclose()
