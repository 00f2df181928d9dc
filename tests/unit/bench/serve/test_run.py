"""The open loop, against a client that answers as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from pdserve.bench.serve.client import Answer, RequestFailed, Served
from pdserve.bench.serve.records import RequestRecord
from pdserve.bench.serve.run import run
from pdserve.bench.serve.workload import PlannedRequest, Workload


def workload(*times_s: float) -> Workload:
    return Workload("made", tuple(PlannedRequest(at_s, (1, 2, 3), 2, 3) for at_s in times_s))


class Scripted:
    """Holds every answer back until `release` is set; then two tokens each."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.all_sent = asyncio.Event()
        self.num_wanted = 0
        self.num_sent = 0
        self.num_cancelled = 0
        self.failures: dict[int, RequestFailed] = {}
        self.num_tokens: int | None = 2

    async def served(self) -> Served:
        return Served("made", None, None)

    async def send(self, request: PlannedRequest, on_tokens: Callable[[], None]) -> Answer:
        index = self.num_sent
        self.num_sent += 1
        if self.num_sent == self.num_wanted:
            self.all_sent.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if index in self.failures:
            raise self.failures[index]
        for _ in range(2 if self.num_tokens != 0 else 0):
            on_tokens()
        return Answer(None, None, self.num_tokens)


async def test_requests_are_sent_at_their_times_though_nothing_is_answered() -> None:
    client = Scripted()
    client.num_wanted = 4
    running = asyncio.create_task(run(workload(0.0, 0.02, 0.02, 0.05), client))
    await asyncio.wait_for(client.all_sent.wait(), 10)
    assert not running.done()
    client.release.set()
    records = await asyncio.wait_for(running, 10)
    assert [record.scheduled_s for record in records] == [0.0, 0.02, 0.02, 0.05]
    assert [record.index for record in records] == [0, 1, 2, 3]
    for record in records:
        assert record.sent_s >= record.scheduled_s - 1e-6
        assert record.is_ok
        assert (len(record.arrivals_s), record.num_tokens, record.num_prompt_tokens) == (2, 2, 3)
        # The answer waited for the last request to be sent; that is all in the TTFT.
        assert record.ttft_s is not None
        assert record.ttft_s >= 0.05 - record.scheduled_s


async def test_a_failure_is_a_record_and_the_others_go_on() -> None:
    client = Scripted()
    client.failures[1] = RequestFailed("429", "too many")
    client.release.set()
    records = await run(workload(0.0, 0.0, 0.0), client)
    assert [record.is_ok for record in records] == [True, False, True]
    assert records[1].failure is not None
    assert (records[1].failure.code, records[1].failure.message) == ("429", "too many")


async def test_an_answer_without_tokens_is_a_failure() -> None:
    client = Scripted()
    client.num_tokens = 0
    client.release.set()
    (record,) = await run(workload(0.0), client)
    assert record.failure is not None
    assert record.failure.code == "EMPTY"


async def test_tokens_are_counted_by_arrivals_where_the_server_does_not() -> None:
    client = Scripted()
    client.num_tokens = None
    client.release.set()
    (record,) = await run(workload(0.0), client)
    assert record.num_tokens == 2


async def test_a_cancelled_run_cancels_what_is_out() -> None:
    client = Scripted()
    client.num_wanted = 2
    running = asyncio.create_task(run(workload(0.0, 0.0, 1000.0), client))
    await asyncio.wait_for(client.all_sent.wait(), 10)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, 10)
    assert (client.num_sent, client.num_cancelled) == (2, 2)


async def test_progress_hears_of_each_request() -> None:
    heard: list[str] = []

    class Heard:
        def sent(self) -> None:
            heard.append("sent")

        def ended(self, record: RequestRecord) -> None:
            heard.append("ended")

    client = Scripted()
    client.release.set()
    await run(workload(0.0, 0.0), client, Heard())
    assert sorted(heard) == ["ended", "ended", "sent", "sent"]
