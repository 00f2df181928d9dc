"""Routers as processes of their own (`router_process.py`), which a test may stop and kill, and whose log
says how far each request has come."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from observability.config import LogFormat, ObservabilityConfig
from observability.moments import Moment
from router.config import RouterConfig
from tests.faults.worker_processes import ROOT, START_S

ANSWER_S = 10.0
_MOMENTS = {moment.value: moment for moment in Moment}


class RouterProcess:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.address = ""
        # By request id: each moment that its log told, with the worker where one has part in it.
        self._told: defaultdict[str, dict[Moment, str | None]] = defaultdict(dict)
        self._changed = asyncio.Condition()
        self._reading = asyncio.ensure_future(self._read_log())

    async def started(self) -> None:
        self.address = (await self._line(START_S))["grpc"]

    async def moment(self, request_id: str, moment: Moment, timeout_s: float) -> str | None:
        """Waits until a request has come so far; the worker that has part in it."""
        told = self._told[request_id]
        async with self._changed:
            await asyncio.wait_for(self._changed.wait_for(lambda: moment in told), timeout_s)
        return told[moment]

    def worker_of(self, request_id: str, moment: Moment) -> str | None:
        """The last one that had part in it. None: it has not come so far."""
        return self._told[request_id].get(moment)

    def has_told(self, request_id: str, moment: Moment) -> bool:
        return moment in self._told[request_id]

    async def held(self) -> str:
        """What it holds for requests, when there are none; empty if nothing."""
        self.process.send_signal(signal.SIGUSR1)
        return (await self._line(ANSWER_S))["held"]

    async def ended(self) -> None:
        await self.process.wait()
        await self._reading

    async def _line(self, timeout_s: float) -> dict[str, str]:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), timeout_s)
        assert line, "the router ended"
        said: dict[str, str] = json.loads(line)
        return said

    async def _read_log(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            try:
                said = json.loads(line)
            except ValueError:
                sys.stderr.write(line.decode(errors="replace"))  # a traceback, or the interpreter's own words
                continue
            if (moment := _MOMENTS.get(said["message"])) is None:
                continue
            async with self._changed:
                self._told[said["request_id"]][moment] = said.get("worker")
                self._changed.notify_all()


@asynccontextmanager
async def launch_router(folder: Path, config: RouterConfig) -> AsyncIterator[RouterProcess]:
    """`folder`: for its configuration's file."""
    told = ObservabilityConfig(log_format=LogFormat.JSON)
    path = folder / f"{config.router_id}.json"
    path.write_text(config.model_copy(update={"observability": told}).model_dump_json())
    command = (sys.executable, "-m", "tests.faults.router_process", "--config", str(path))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe)
    router = RouterProcess(process)
    try:
        await router.started()
        yield router
    finally:
        if process.returncode is None:
            process.kill()
        await router.ended()
