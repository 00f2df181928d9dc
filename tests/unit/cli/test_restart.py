"""A rolling restart asks for one worker after the other, and says how far it came."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import cast

import pytest

from pdserve.cli import restart, watching
from pdserve.cli.restart import Rolling
from pdserve.client import Client, Cluster, FailedPrecondition, Pool, Role, Unavailable, Worker, WorkerState
from tests.integration.router.harness import until
from tests.unit.cli.test_shown import cluster, pool

READY, DRAINING = WorkerState.READY, WorkerState.DRAINING


class ScriptedClient:
    """A cluster in which a drain with `replace` does what a controller would do, a look later."""

    def __init__(self, first: Cluster) -> None:
        self.now = first
        self.asked: list[tuple[str, bool, float | None]] = []
        self.trouble: str | None = None
        # How many looks fail first.
        self.num_away = 0
        self.is_stuck = False
        self.refusal: FailedPrecondition | None = None

    async def get_cluster(self, timeout: float) -> Cluster:
        if self.num_away:
            self.num_away -= 1
            raise Unavailable("the controller does not answer", reason="CONTROLLER_LOST")
        return self.now

    async def drain_worker(
        self,
        worker_id: str,
        replace: bool,
        replace_first: bool,
        drain_timeout_s: float | None,
        timeout: float,
    ) -> Cluster:
        assert replace
        self.asked.append((worker_id, replace_first, drain_timeout_s))
        if self.trouble is not None:
            self._change(lambda pool: _replaced(pool, unrecoverable_reason=self.trouble))
        elif not self.is_stuck:
            self._change(lambda pool: _replaced(pool, workers=tuple(_renewed(pool.workers, worker_id))))
        if self.refusal is not None:
            raise self.refusal
        return self.now

    def _change(self, change) -> None:  # type: ignore[no-untyped-def]
        self.now = replace(self.now, pools=tuple(change(each) for each in self.now.pools))


_replaced = replace


def _renewed(workers: tuple[Worker, ...], worker_id: str) -> list[Worker]:
    return [
        replace(each, instance_id=each.instance_id + "+") if each.id == worker_id else each
        for each in workers
    ]


def scripted() -> ScriptedClient:
    pools = [pool(Role.PREFILL, 1, READY), pool(Role.DECODE, 2, READY, READY)]
    named = []
    for each in pools:
        workers = [
            replace(worker, id=f"{each.role.value}-{number}", instance_id=f"{each.role.value}{number}")
            for number, worker in enumerate(each.workers)
        ]
        named.append(replace(each, workers=tuple(workers)))
    return ScriptedClient(cluster(*named))


def run(rolling: Rolling, client: ScriptedClient, *names: str) -> None:
    asyncio.run(rolling.run(cast(Client, client), list(names)))


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart, "_LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(watching, "_LOOK_EVERY_S", 0.001)


def test_every_worker_is_replaced_in_turn() -> None:
    client, rolling = scripted(), Rolling(surge=True, drain_timeout_s=9.0)
    run(rolling, client)
    assert client.asked == [(name, True, 9.0) for name in ("prefill-0", "decode-0", "decode-1")]
    assert rolling.told() == "3 of 3 workers are new"


def test_only_the_pools_that_are_named_and_without_surge_if_so_wanted() -> None:
    client, rolling = scripted(), Rolling(surge=False, drain_timeout_s=None)
    run(rolling, client, "decode")
    assert client.asked == [("decode-0", False, None), ("decode-1", False, None)]


def test_a_controller_that_is_away_for_a_moment_is_waited_for() -> None:
    client, rolling = scripted(), Rolling(surge=True, drain_timeout_s=None)

    async def scenario() -> None:
        running = asyncio.ensure_future(rolling.run(cast(Client, client), ["prefill"]))
        await asyncio.sleep(0)  # it has seen the cluster once
        client.num_away = 3
        await asyncio.wait_for(running, 10)

    asyncio.run(scenario())
    assert rolling.told() == "1 of 1 workers are new"


def test_a_worker_that_was_forgotten_by_a_new_controller_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(restart, "_ASK_AGAIN_S", 0.01)
    client, rolling = scripted(), Rolling(surge=True, drain_timeout_s=None)
    client.is_stuck = True

    async def scenario() -> None:
        running = asyncio.ensure_future(rolling.run(cast(Client, client), ["prefill"]))
        await until(lambda: len(client.asked) == 2, 15.0)
        client.is_stuck = False
        await asyncio.wait_for(running, 10)

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_where_no_new_worker_can_start_the_old_one_stays_and_the_rest_is_left_alone() -> None:
    client, rolling = scripted(), Rolling(surge=True, drain_timeout_s=None)
    client.trouble = "no weights"
    with pytest.raises(Unavailable, match="prefill-0 stays, no other can start: no weights"):
        run(rolling, client)
    assert [worker for worker, _, _ in client.asked] == ["prefill-0"]


def test_an_interrupt_says_how_far_it_came() -> None:
    client, rolling = scripted(), Rolling(surge=True, drain_timeout_s=None)
    client.is_stuck = True

    async def scenario() -> None:
        running = asyncio.ensure_future(rolling.run(cast(Client, client), []))
        await until(lambda: client.asked != [], 15.0)
        running.cancel()
        await asyncio.wait({running})

    asyncio.run(asyncio.wait_for(scenario(), 20))
    assert rolling.told().startswith("0 of 3 workers are new; prefill-0 is still being replaced")


def moved(client: ScriptedClient, *changed: Pool) -> None:
    others = [pool for pool in client.now.pools if pool.role not in {each.role for each in changed}]
    client.now = replace(client.now, pools=(*others, *changed))


def test_what_another_restart_has_begun_is_waited_for_and_then_all_are_replaced() -> None:
    client, rolling = scripted(), Rolling(surge=False, drain_timeout_s=None)
    before = client.now
    moved(client, pool(Role.PREFILL, 1, DRAINING))

    async def scenario() -> None:
        running = asyncio.ensure_future(rolling.run(cast(Client, client), ["prefill"]))
        await asyncio.sleep(0.05)
        moved(client, pool(Role.PREFILL, 1, WorkerState.STARTING))
        await asyncio.sleep(0.05)
        assert client.asked == []
        client.now = before
        await asyncio.wait_for(running, 10)

    asyncio.run(scenario())
    assert [worker for worker, _, _ in client.asked] == ["prefill-0"]
    assert rolling.told() == "1 of 1 workers are new"


def test_a_worker_that_somebody_else_lets_go_at_the_same_moment_is_no_failure() -> None:
    client, rolling = scripted(), Rolling(surge=True, drain_timeout_s=None)
    client.refusal = FailedPrecondition("prefill-0 is draining: only a ready worker can be drained")
    run(rolling, client, "prefill")
    assert rolling.told() == "1 of 1 workers are new"


def test_where_there_is_no_worker_it_says_that_nothing_was_replaced() -> None:
    client, rolling = scripted(), Rolling(surge=True, drain_timeout_s=None)
    moved(client, pool(Role.PREFILL, 0))
    run(rolling, client, "prefill")
    assert rolling.told() == "nothing was replaced: no worker is wanted in prefill"
    moved(client, pool(Role.PREFILL, 1, WorkerState.DEAD, reason="no weights"))
    with pytest.raises(Unavailable, match="prefill: no weights"):
        run(rolling, client, "prefill")
    assert client.asked == []


@pytest.mark.parametrize("surge", [True, False])
def test_a_worker_that_goes_before_the_new_one_is_ready_is_told_of(
    surge: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    client, rolling = scripted(), Rolling(surge=surge, drain_timeout_s=None)
    client.is_stuck = True
    starting = pool(Role.PREFILL, 1, WorkerState.STARTING)

    async def scenario() -> None:
        running = asyncio.ensure_future(rolling.run(cast(Client, client), ["prefill"]))
        await until(lambda: client.asked != [], 15.0)
        moved(client, starting)
        await asyncio.sleep(0.1)
        moved(client, pool(Role.PREFILL, 1, READY))
        await asyncio.wait_for(running, 10)

    asyncio.run(asyncio.wait_for(scenario(), 30))
    told = "prefill-0 went before another was ready: there is no room for both"
    assert (told in capsys.readouterr().out) == surge
