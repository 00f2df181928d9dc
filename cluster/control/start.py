"""A worker's way from its launch to where requests may come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cluster.control.membership import SERVING, Membership
from cluster.control.policy import layout_difference
from cluster.control.probe import Probe
from cluster.control.running import Running
from cluster.control.worker_handle import Loading, Pending, Started, StartFailed
from trust.trust import Trust


class StartError(Exception):
    """A worker did not become ready; says why."""


class Start:
    """`tell` is called when it turns out that there is no room for it."""

    def __init__(
        self,
        running: Running,
        membership: Membership,
        trust: Trust,
        register_timeout_s: float,
        tell: Callable[[], None],
    ) -> None:
        self._running = running
        self._membership = membership
        self._trust = trust
        self._register_timeout_s = register_timeout_s
        self._tell = tell

    async def done(self, timeout_s: float) -> None:
        """Raises StartError, and WorkerGone as the handle does."""
        try:
            await asyncio.wait_for(self._follow(), timeout_s)
        except asyncio.TimeoutError as error:
            raise StartError(f"not ready within {timeout_s:g} s: {self._running.member.detail}") from error

    async def _follow(self) -> None:
        member = self._running.member
        async for event in self._running.handle.start():
            if isinstance(event, Pending):
                self._membership.describe(member, event.reason)
                member.finds_no_room = event.finds_no_room
                if event.finds_no_room:
                    self._tell()
            elif isinstance(event, Loading):
                member.pid, member.node = event.pid, event.node
                member.finds_no_room = False
                self._membership.describe(member, event.detail)
                self._running.has_spoken.set()
            elif isinstance(event, StartFailed):
                raise StartError(event.reason)
            elif isinstance(event, Started):
                await self._register(event.address)
                return
        raise StartError("its start ended without a result")

    async def _register(self, address: str) -> None:
        """Takes it in, unless it could not hand KV to those that are there."""
        member, self._running.probe = self._running.member, Probe(address, self._trust)
        await self._running.ask(self._register_timeout_s)
        if member.report is None:
            raise StartError(f"it says that it serves {address}, and does not answer there")
        others = [
            (other.worker_id, other.report.limits.layout)
            for other in self._membership.members()
            if other.state in SERVING and other.report is not None
        ]
        difference = layout_difference(member.report.limits.layout, others)
        if difference is not None:
            raise StartError(difference)
        member.address, member.pid = address, member.report.pid
        member.node = member.report.node or member.node  # of one that was found serving nothing else tells it
