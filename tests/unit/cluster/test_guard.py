"""Whoever restarts a router is told of the new one at once; an actor that is gone, or hangs, is made anew."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import cast

import pytest
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from cluster.actors import guard as guards
from cluster.actors.guard import Guard
from cluster.control.snapshot import PartState


@dataclass
class Method:
    remote: Callable[..., Awaitable[object]]


@dataclass
class ScriptedActor:
    """An actor of a router as a guard sees it. `pings`: how often it answers before it `ends`."""

    pid: int = 5281
    drained_s: list[float] = field(default_factory=list)
    pings: int = 0
    ends: Callable[[], Awaitable[None]] | None = None

    @property
    def start(self) -> Method:
        async def answer() -> str:
            return "127.0.0.1:1"

        return Method(answer)

    @property
    def restart(self) -> Method:
        async def answer(drain_s: float) -> None:
            self.drained_s.append(drain_s)
            self.pid = 5496

        return Method(answer)

    @property
    def ping(self) -> Method:
        async def answer() -> int:
            self.pings -= 1
            if self.pings < 0 and self.ends is not None:
                await self.ends()
            return self.pid

        return Method(answer)


def test_after_a_restart_the_new_pid_is_known_before_the_next_look() -> None:
    actor, told = ScriptedActor(), []
    guard = Guard("router-0", lambda: cast(ActorHandle, actor), lambda: told.append(guard.state))
    asyncio.run(asyncio.wait_for(guard.restart(7.0), 10))
    assert actor.drained_s == [7.0]
    assert told == [guard.state] == [PartState("", 5496)]


async def died() -> None:
    raise RayActorError


async def hangs() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(("ends", "is_killed"), [(died, False), (hangs, True)])
def test_an_actor_that_is_gone_or_hangs_is_made_anew(
    monkeypatch: pytest.MonkeyPatch, ends: Callable[[], Awaitable[None]], is_killed: bool
) -> None:
    monkeypatch.setattr(guards, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(guards, "_SILENT_AFTER_S", 0.2)
    monkeypatch.setattr(guards, "process_here", lambda actor: None)
    killed: list[object] = []
    monkeypatch.setattr(guards, "kill_actor", lambda actor, process: killed.append(actor))
    first, second = ScriptedActor(pings=2, ends=ends), ScriptedActor(pid=5496)
    made = iter((first, second))
    guard = Guard("the controller", lambda: cast(ActorHandle, next(made)), lambda: states.append(guard.state))
    states: list[PartState] = []

    async def scenario() -> None:
        await asyncio.wait_for(guard.keep(), 30)
        assert states[0] == PartState("", 5281)
        assert states[-1].trouble
        assert killed == ([first] if is_killed else [])
        keeping = asyncio.ensure_future(guard.keep())
        while guard.state != PartState("", 5496):
            assert not keeping.done()
            await asyncio.sleep(0.01)
        keeping.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 60))
