"""Whoever restarts a router is told of the new one at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import cast

from ray.actor import ActorHandle

from cluster.actors.guard import Guard
from cluster.control.snapshot import PartState


@dataclass
class Method:
    remote: Callable[..., Awaitable[object]]


@dataclass
class ScriptedActor:
    """An actor of a router as a guard sees it."""

    pid: int = 5281
    drained_s: list[float] = field(default_factory=list)

    @property
    def restart(self) -> Method:
        async def answer(drain_s: float) -> None:
            self.drained_s.append(drain_s)
            self.pid = 5496

        return Method(answer)

    @property
    def ping(self) -> Method:
        async def answer() -> int:
            return self.pid

        return Method(answer)


def test_after_a_restart_the_new_pid_is_known_before_the_next_look() -> None:
    actor, told = ScriptedActor(), []
    guard = Guard("router-0", lambda: cast(ActorHandle, actor), lambda: told.append(guard.state))
    asyncio.run(asyncio.wait_for(guard.restart(7.0), 10))
    assert actor.drained_s == [7.0]
    assert told == [guard.state] == [PartState("", 5496)]
