"""What a router remembers of its last requests, on scripted workers."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.client import PdserveError, ResourceExhausted
from router.events import Moment
from router.recent import recent as recent_module
from router.recent.window import WINDOW_S
from tests.integration.router.harness import Cluster, until

WHOLE = ["RECEIVED", "QUEUED", "RESERVED", "PREFILL_BEGIN", "FIRST_TOKEN", "DECODE_BEGIN", "FINISHED"]


async def test_a_finished_request_has_its_moments_tokens_and_workers(cluster: Cluster) -> None:
    await cluster.client.generate([1, 2, 3], max_tokens=8, request_id="mine")
    (timeline,) = cluster.router.recent.newest(5)
    await until(lambda: timeline.outcome is not None)  # behind the last word to the client
    assert (timeline.request_id, timeline.prompt_tokens, timeline.outcome) == (
        "mine",
        3,
        "FINISH_REASON_LENGTH",
    )
    moments = [mark.moment.value for mark in timeline.marks]
    assert [each for each in moments if each in WHOLE] == WHOLE
    workers = {mark.moment: mark.worker for mark in timeline.marks}
    assert workers[Moment.PREFILL_BEGIN] == "prefill-0"
    assert workers[Moment.DECODE_BEGIN] == "decode-0"
    told = timeline.as_object()["tokens"]
    assert isinstance(told, dict)
    assert sum(told["counts"]) == 8
    assert told["at_ms"] == sorted(told["at_ms"])
    assert timeline.timings is not None
    assert timeline.timings.ttft_ms == pytest.approx(told["at_ms"][0], abs=50)


async def test_each_of_n_sequences_has_a_timeline_and_old_ones_go(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.client.generate([1], max_tokens=2, n=3)
    assert sorted(each.index for each in cluster.router.recent.newest(9)) == [0, 1, 2]
    for number in range(recent_module.MAX_ENDED):
        await cluster.client.generate([1], max_tokens=1, request_id=str(number))
    kept = cluster.router.recent.newest(1000)
    assert [each.request_id for each in kept] == [str(n) for n in reversed(range(recent_module.MAX_ENDED))]


async def test_sequences_that_never_began_were_never_told_of(cluster: Cluster) -> None:
    """Who saw them would wait for their end for ever."""
    cluster.p.hold_token.clear()
    asked = asyncio.ensure_future(cluster.client.generate([1], n=4))
    await until(lambda: cluster.p.num_prefills == 1)
    assert [each.index for each in cluster.router.recent.newest(9)] == [0]
    asked.cancel()
    await asyncio.wait({asked}, timeout=10)
    cluster.p.hold_token.set()
    await until(cluster.is_idle)
    assert [(each.index, each.outcome) for each in cluster.router.recent.newest(9)] == [(0, "CANCELLED")]


async def test_what_ends_early_says_how_and_leaves_nothing(cluster: Cluster) -> None:
    cluster.p.hold_token.clear()
    asked = asyncio.ensure_future(cluster.client.generate([1], request_id="gone"))
    await until(lambda: cluster.p.num_prefills == 1)
    (running,) = cluster.router.recent.newest(5)
    assert running.outcome is None
    asked.cancel()
    await asyncio.wait({asked}, timeout=10)
    cluster.p.hold_token.set()
    await until(lambda: running.outcome == "CANCELLED")
    cluster.d.reserve_error = ResourceExhausted("no blocks")
    with pytest.raises(PdserveError):  # one of several, as it happens
        await cluster.client.generate([1], timeout=0.3)
    await until(cluster.is_idle)
    assert not cluster.router.recent._running


async def test_one_that_waits_for_room_is_queued_once_however_often_it_asks(cluster: Cluster) -> None:
    cluster.d.reserve_error = ResourceExhausted("no blocks")
    with pytest.raises(PdserveError):
        await cluster.client.generate([1], timeout=1.0)
    await until(cluster.is_idle)
    assert cluster.router._dispatcher.num_refusals > 1
    (timeline,) = cluster.router.recent.newest(9)
    assert [mark.moment for mark in timeline.marks] == [Moment.RECEIVED, Moment.QUEUED, Moment.FINISHED]


async def test_the_cluster_is_told_with_what_this_routers_clients_feel(cluster: Cluster) -> None:
    cluster.d.step_s = 0.01
    await cluster.client.generate([1] * 20, max_tokens=10)
    recent = cluster.router.recent
    await until(lambda: recent.finished.count == 1)  # once its second is over
    load = (await cluster.client.get_cluster()).load
    assert (load.num_running, load.num_waiting, load.window_ms) == (0, 0, WINDOW_S * 1000)
    assert load.prompt_tokens_per_s == 2.0
    assert load.output_tokens_per_s == 1.0
    assert load.ttft_ms.count == 1
    assert load.itl_ms.count >= 1
    assert 5 < load.itl_ms.p50 < 1000
