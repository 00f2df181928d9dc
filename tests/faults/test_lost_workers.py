"""A worker's process is killed or stopped while a request is on it: the request goes on elsewhere with the
model's tokens, and whoever is left has every block back."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from pdserve.client import Client
from router.events import LifetimeEvent, Moment
from tests.faults.fleet import Fleet, fleet
from tests.integration.router.harness import until
from tests.unit.engine.driving import Reference, prompt
from worker.identity import Role

pytestmark = pytest.mark.timeout(300)  # processes start, which takes long where much else runs
BOTH = [Role.PREFILL, Role.DECODE]
# Each can be reached by a kill. Before QUEUED there is nothing, and after FINISHED it is over.
STATES = [moment for moment in Moment if moment not in (Moment.RECEIVED, Moment.FINISHED)]
# Ten of each role at each moment.
NUM_KILLS = {"grpc": 3, "shm": 4, "collective": 3}


def two_of(role: Role) -> dict[Role, int]:
    return {each: 2 if each is role else 1 for each in BOTH}


async def _is_in_the_middle(cluster: Fleet) -> None:
    """Some of the request's KV is there, and not all of it."""
    await until(lambda: Role.DECODE in cluster.used, 30.0)
    receiving = cluster.workers[cluster.used[Role.DECODE]]
    before = (await receiving.status()).counters.kv_bytes_received
    await receiving.until(lambda status: status.counters.kv_bytes_received > before, 20.0)


@pytest.mark.parametrize("blow", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("transport", "role"),
    [
        ("collective", Role.DECODE),
        *(
            pytest.param(transport, role, marks=pytest.mark.full)
            for transport in NUM_KILLS
            for role in BOTH
            if (transport, role) != ("collective", Role.DECODE)
        ),
    ],
)
async def test_a_request_that_loses_a_worker_in_the_middle_of_its_transfer_goes_on_elsewhere(
    folder: Path, reference: Reference, transport: str, role: Role, blow: signal.Signals
) -> None:
    ids = prompt(1900)
    async with fleet(folder, transport, two_of(role)) as (cluster, client):
        generate = client.generate(ids, max_tokens=8, temperature=0, ignore_eos=True, timeout=60)
        answering = asyncio.ensure_future(generate)
        await _is_in_the_middle(cluster)
        victim = cluster.used[role]
        cluster.workers[victim].send(blow)
        assert not answering.done()
        answer = await answering
        reference.assert_follows(ids, answer.token_ids)
        # Since it went on elsewhere.
        assert cluster.used[role] != victim
        if blow is signal.SIGKILL:
            await cluster.bury(victim)
        else:
            cluster.workers[victim].send(signal.SIGCONT)
        await cluster.until_nothing_is_held()
        # All of the pair that are left can work with each other, and by the way that was meant.
        for number in range(2 * len(cluster.of(role))):
            again = await client.generate(
                prompt(100, number), max_tokens=4, temperature=0, ignore_eos=True, timeout=30
            )
            reference.assert_follows(prompt(100, number), again.token_ids)


@dataclass
class Standing:
    """A fleet that several tests use, one after the other; `blow` is told each event."""

    cluster: Fleet
    client: Client
    blow: Callable[[LifetimeEvent], None]

    async def be_whole(self) -> None:
        """Also after a test that failed half way."""
        for name, process in list(self.cluster.workers.items()):
            if process.process.returncode is not None:
                await self.cluster.bury(name)
        await self.cluster.launch({role: max(0, 2 - len(self.cluster.of(role))) for role in BOTH})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def standing(folder: Path, request: pytest.FixtureRequest) -> AsyncIterator[Standing]:
    async with fleet(folder, request.param, dict.fromkeys(BOTH, 2)) as (cluster, client):
        made = Standing(cluster, client, lambda _: None)
        cluster.router.on_event(lambda event: made.blow(event))
        yield made


@pytest.mark.full
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("moment", STATES)
@pytest.mark.parametrize("role", BOTH)
@pytest.mark.parametrize("standing", NUM_KILLS, indirect=True, scope="module")
async def test_ten_kills_at_each_moment_change_no_token_and_leave_nothing(
    reference: Reference, standing: Standing, role: Role, moment: Moment, request: pytest.FixtureRequest
) -> None:
    cluster, client = standing.cluster, standing.client
    await standing.be_whole()
    killed: list[str] = []

    def kill(event: LifetimeEvent) -> None:
        if event.moment is moment and not killed:
            victim = cluster.used.get(role, cluster.of(role)[0])
            killed.append(victim if victim in cluster.workers else cluster.of(role)[0])
            cluster.workers[killed[0]].send(signal.SIGKILL)

    # Prompts of its own: another test's would be in the caches.
    first = 100 * (1 + STATES.index(moment)) + 50 * BOTH.index(role)
    for number in range(NUM_KILLS[request.node.callspec.params["standing"]]):
        killed.clear()
        ids = prompt(200, first + number)
        standing.blow = kill
        generate = client.generate(ids, max_tokens=12, temperature=0, ignore_eos=True, timeout=60)
        answer, _ = await asyncio.gather(generate, cluster.launch({role: 1}))
        standing.blow = lambda _: None
        reference.assert_follows(ids, answer.token_ids)
        await cluster.bury(killed[0])
        await cluster.until_nothing_is_held()
