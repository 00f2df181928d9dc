"""n > 1: n sequences of one request as one stream.

The first runs ahead until its prompt lies in both workers' prefix caches; the others then hit it there.
One that fails ends all.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from router.outputs import Output
from router.request import Request

Generate = Callable[[Request], AsyncGenerator[Output, None]]


async def merged(requests: Sequence[Request], generate: Generate) -> AsyncGenerator[Output, None]:
    """Outputs as they come; those of one sequence in order. A slow reader holds all of them back."""
    queue: asyncio.Queue[Output] = asyncio.Queue(maxsize=1)
    first = requests[0]

    async def pump(request: Request) -> None:
        if request is not first:
            await first.is_warm.wait()
        async with aclosing(generate(request)) as outputs:
            async for output in outputs:
                await queue.put(output)

    pumps = {asyncio.create_task(pump(request)) for request in requests}
    try:
        async for output in _until_all_end(queue, pumps):
            yield output
    finally:
        for task in pumps:
            task.cancel()
        # Each failure was raised above, or came of this cancel.
        await asyncio.gather(*pumps, return_exceptions=True)


async def _until_all_end(
    queue: asyncio.Queue[Output], pumps: set[asyncio.Task[None]]
) -> AsyncGenerator[Output, None]:
    running: set[asyncio.Task[None]] = set(pumps)
    while running or not queue.empty():
        getting = asyncio.create_task(queue.get())
        either: set[asyncio.Task[Output] | asyncio.Task[None]] = {getting, *running}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in running if task.done()]:
                running.discard(task)
                task.result()
            if getting.done():
                yield getting.result()
        finally:
            getting.cancel()
