"""Several sequences as one stream: n > 1, or a list of prompts.

Of n sequences the first runs ahead until its prompt lies in both workers' prefix caches; the others then
hit it there. One that fails ends all.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from pdserve.v1.errors import PdserveError
from router.outputs import Output
from router.request import Request

Generate = Callable[[Request], AsyncGenerator[Output, None]]
Outputs = AsyncGenerator[Output, None]


def first_then_others(requests: Sequence[Request], generate: Generate) -> Outputs:
    """The n sequences of one request."""
    first, *others = requests
    return merged([generate(first), *(_when_warm(first, generate(other)) for other in others)])


async def _when_warm(first: Request, outputs: Outputs) -> Outputs:
    async with aclosing(outputs):
        await first.is_warm.wait()
        async for output in outputs:
            yield output


async def numbered_from(start: int, outputs: Outputs) -> Outputs:
    """The same outputs, their indices counted from `start`."""
    async with aclosing(outputs):
        async for output in outputs:
            yield replace(output, index=start + output.index)


async def merged(streams: Sequence[Outputs]) -> Outputs:
    """Outputs as they come; those of one stream in order. A slow reader holds all of them back."""
    arrivals: asyncio.Queue[Output | asyncio.Task[None]] = asyncio.Queue()
    room = asyncio.Semaphore(1)

    async def pump(outputs: Outputs) -> None:
        async with aclosing(outputs):
            async for output in outputs:
                await room.acquire()
                arrivals.put_nowait(output)

    pumps = [asyncio.create_task(pump(outputs)) for outputs in streams]
    for task in pumps:
        task.add_done_callback(arrivals.put_nowait)
    num_running = len(pumps)
    try:
        while num_running:
            arrival = await arrivals.get()
            if isinstance(arrival, asyncio.Task):
                num_running -= 1
                arrival.result()
            else:
                room.release()
                yield arrival
    except asyncio.CancelledError as cancelled:
        for outcome in await _end(pumps):
            # Of a deadline that passed: what it was that took so long.
            if isinstance(outcome, PdserveError):
                raise outcome from cancelled
        raise
    finally:
        await _end(pumps)


async def _end(pumps: Sequence[asyncio.Task[None]]) -> list[BaseException | None]:
    """How each ended. Failures other than by this cancel were raised by whoever took the outputs."""
    for task in pumps:
        task.cancel()
    return await asyncio.gather(*pumps, return_exceptions=True)
