"""One question to the controller for all pages that are open."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from pdserve.v1.cluster_pb2 import ClusterSnapshot
from pdserve.v1.errors import Unavailable
from router.page.snapshots import Snapshots
from router.router import Router


class Asked:
    """A router whose controller hangs until `goes_on`."""

    def __init__(self, answer: ClusterSnapshot | Unavailable) -> None:
        self.answer = answer
        self.num_asked = 0
        self.goes_on = asyncio.Event()

    async def ask_controller(self, method: object, message: object) -> ClusterSnapshot:
        self.num_asked += 1
        await self.goes_on.wait()
        if isinstance(self.answer, Unavailable):
            raise self.answer
        return self.answer


@pytest.mark.parametrize("answer", [ClusterSnapshot(name="x"), Unavailable("it hangs")])
async def test_all_who_wait_get_the_answer_to_one_question(answer: ClusterSnapshot | Unavailable) -> None:
    router = Asked(answer)
    snapshots = Snapshots(cast(Router, router))
    reading = [asyncio.ensure_future(snapshots.read()) for _ in range(4)]
    await asyncio.sleep(0)
    router.goes_on.set()
    assert await asyncio.gather(*reading, return_exceptions=True) == [answer] * 4
    assert router.num_asked == 1


async def test_who_comes_after_a_failure_asks_anew() -> None:
    router = Asked(Unavailable("it hangs"))
    router.goes_on.set()
    snapshots = Snapshots(cast(Router, router))
    with pytest.raises(Unavailable):
        await snapshots.read()
    router.answer = ClusterSnapshot(name="x")
    assert (await snapshots.read()).name == "x"
