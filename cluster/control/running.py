"""A worker in the books, with its process."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from cluster.control.membership import Member
from cluster.control.probe import Probe
from cluster.control.worker_handle import WorkerHandle
from router.fleet.vigil import Vigil, vitals_of


@dataclass(slots=True)
class Running:
    member: Member
    handle: WorkerHandle
    vigil: Vigil
    # Its process was there before this supervisor.
    is_adopted: bool = False
    # Set when it has said how it is, or will not any more.
    has_spoken: asyncio.Event = field(default_factory=asyncio.Event)
    # From when it serves.
    probe: Probe | None = None

    async def ask(self, timeout_s: float) -> None:
        """For a fresh report. Without an answer in time all stays as it was."""
        if self.probe is None:
            return
        report = await self.probe.describe(timeout_s)
        if report is not None:
            self.member.report = report
            self.vigil.heard(vitals_of(report.vitals))

    async def close(self) -> None:
        """Ends its process, if it still runs, and the way to it."""
        self.has_spoken.set()
        self.handle.kill()
        if self.probe is not None:
            await self.probe.close()
