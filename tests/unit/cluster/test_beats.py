"""A child that ends, hangs, or says that it runs: real processes."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from cluster.actors.beats import until_ended

BEATS = "import time\nwhile True: print(flush=True); time.sleep(0.02)"
Start = Callable[[str], Awaitable[asyncio.subprocess.Process]]


@pytest_asyncio.fixture
async def start() -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def started(code: str) -> asyncio.subprocess.Process:
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
            )
            stack.push_async_callback(child.communicate)
            stack.callback(lambda: child.kill() if child.returncode is None else None)
            return child

        yield started


async def test_one_that_ends_is_told_by_its_code(start: Start) -> None:
    assert await asyncio.wait_for(until_ended(await start("print(); raise SystemExit(7)")), 20) == 7


async def test_one_that_hangs_is_killed_stopped_or_not(start: Start) -> None:
    for code in ("import time; print(flush=True); time.sleep(1000)", BEATS):
        child = await start(code)
        if code == BEATS:
            child.send_signal(signal.SIGSTOP)
        assert await asyncio.wait_for(until_ended(child, look_s=0.1), 20) == -signal.SIGKILL


async def test_one_that_says_that_it_runs_is_left_alone(start: Start) -> None:
    child = await start(BEATS)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(until_ended(child, look_s=1.0), 6.0)
    assert child.returncode is None
