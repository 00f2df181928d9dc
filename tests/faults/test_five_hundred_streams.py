"""Five hundred streams at once over two prefill and two decode workers, all of them processes: each has
exactly one end, and the router's memory is what it was."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from engine.sampling import SamplingParams
from pdserve.client import Client, Delta, Finished, PdserveError
from tests.faults.matrix.rig import Rig, rig
from tests.integration.router.harness import until
from tests.unit.engine.driving import Reference, prompt
from worker.identity import Role

NUM_STREAMS, NUM_CLIENTS = 500, 10
MAX_TOKENS = 24
TIMEOUT_S = 240.0
# Of the router: while it has them all, and for good.
PEAK_BYTES, GROWTH_BYTES = 128 << 20, 12 << 20


@dataclass
class Stream:
    number: int
    ids: list[int]
    ends: list[object]

    @property
    def prompt(self) -> tuple[int, ...]:
        return prompt(5 + self.number % 60, seed=self.number)


async def read(client: Client, stream: Stream) -> None:
    events = client.generate_stream(
        stream.prompt,
        max_tokens=MAX_TOKENS,
        temperature=0.9,
        seed=stream.number,
        ignore_eos=True,
        timeout=TIMEOUT_S,
    )
    try:
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Delta):
                    assert not stream.ends, "tokens behind the end"
                    stream.ids.extend(event.token_ids)
                elif isinstance(event, Finished):
                    stream.ends.append(event)
    except PdserveError as error:
        stream.ends.append(error)


async def all_at_once(address: str, streams: Sequence[Stream]) -> None:
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client(address)) for _ in range(NUM_CLIENTS)]
        reading = [read(clients[stream.number % NUM_CLIENTS], stream) for stream in streams]
        await asyncio.wait_for(asyncio.gather(*reading), TIMEOUT_S + 10)


class Peak:
    """Of a process's memory, looked at now and then."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.num_bytes = 0

    def now(self) -> int:
        return int(self._process.memory_info().rss)

    async def watch(self) -> None:
        while True:
            self.num_bytes = max(self.num_bytes, self.now())
            await asyncio.sleep(0.1)


async def kill_one_that_decodes(cluster: Rig, streams: Sequence[Stream]) -> None:
    await until(lambda: sum(bool(each.ids) for each in streams) >= NUM_STREAMS // 10, TIMEOUT_S)
    victim = cluster.of(Role.DECODE)[0]
    victim.process.send(signal.SIGKILL)
    await cluster.bury(victim)


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_each_of_five_hundred_streams_has_one_end_and_the_router_keeps_nothing(
    folder: Path, reference: Reference, tmp_path: Path
) -> None:
    async with rig(folder, tmp_path, max_queued_requests=NUM_STREAMS) as cluster:
        await cluster.ready()
        peak = Peak(cluster.running.process.pid)
        watching = asyncio.ensure_future(peak.watch())
        rests: list[int] = []
        for wave in range(4):
            streams = [Stream(number, [], []) for number in range(NUM_STREAMS)]
            asking = all_at_once(cluster.front.address, streams)
            killing = kill_one_that_decodes(cluster, streams) if wave == 3 else asyncio.sleep(0)
            await asyncio.gather(asking, killing)
            assert all(len(stream.ends) == 1 for stream in streams)
            assert all(isinstance(stream.ends[0], Finished) for stream in streams)
            for stream in streams[wave::50]:
                sampling = SamplingParams(temperature=0.9, seed=stream.number)
                assert len(stream.ids) == MAX_TOKENS
                reference.assert_follows(stream.prompt, stream.ids, sampling)
            assert await cluster.leaks() == []
            rests.append(peak.now())
        watching.cancel()
    # The first wave makes what stays: connections, caches, the allocator's arenas.
    assert rests[-1] - rests[0] < GROWTH_BYTES, rests
    assert peak.num_bytes - rests[0] < PEAK_BYTES
