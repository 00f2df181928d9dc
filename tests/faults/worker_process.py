"""A worker in a process of its own, to be killed or stopped:
`worker_process.py ROLE MODEL_FOLDER PATIENCE_S TRANSPORT [ANNOUNCED]`.

Prints its address when it serves, and behind it where KV is to be pushed to; reservations name ANNOUNCED
instead of that, where it is given. A line on stdin: it drains, prints `drained` and ends. Ends when its stdin
closes.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from cluster.actors.kv_ways import SHARES_MEMORY, make_endpoint, make_transports
from cluster.config import TransportName
from decode_worker.config import DecodeConfig
from decode_worker.worker import DecodeWorker
from engine.config import EngineConfig, ModelConfig
from engine.engine import Engine
from engine.kv_pool import allocate_memory
from engine.loop import EngineLoop
from kv_transfer.send_queue import SenderConfig
from kv_transfer.shared_pool import PoolMemory
from kv_transfer.transport.base import FrameSink, PushEndpoint
from kv_transfer.ways import Way
from prefill_worker.config import PrefillConfig
from prefill_worker.worker import PrefillWorker
from tests.trusted import TRUST

# Small chunks and frames, so that there is a middle to be killed in.
ENGINE = EngineConfig(num_blocks=256, max_num_batched_tokens=16)


class Elsewhere:
    """An endpoint that is reached by somebody else's address."""

    def __init__(self, announced: str, make: Callable[[FrameSink], PushEndpoint], sink: FrameSink) -> None:
        self._endpoint = make(sink)
        self._announced = announced
        self.start, self.stop = self._endpoint.start, self._endpoint.stop

    @property
    def own(self) -> tuple[Way, ...]:
        return self._endpoint.ways

    @property
    def ways(self) -> tuple[Way, ...]:
        return tuple(replace(way, address=self._announced) for way in self.own)


async def serve(
    role: str, folder: str, patience_s: float, transport: TransportName, announced: str | None
) -> None:
    memory = PoolMemory()
    allocate = memory if transport in SHARES_MEMORY else allocate_memory
    engine = Engine.load(ModelConfig(id=folder, device="cpu"), ENGINE, allocate=allocate)
    loop = EngineLoop(engine)
    loop.start()
    worker: PrefillWorker | DecodeWorker
    name = f"{role}-{os.getpid()}"
    elsewhere: list[Elsewhere] = []
    if role == "prefill":
        sender = SenderConfig(frame_bytes=1, ack_timeout_s=patience_s)
        transports = make_transports(TRUST, engine.pool, 5.0)
        worker = PrefillWorker(name, loop, TRUST, config=PrefillConfig(sender=sender), transports=transports)
    else:
        endpoint = partial(make_endpoint, TRUST, transport, engine.pool, memory, "127.0.0.1")

        def behind(sink: FrameSink) -> PushEndpoint:
            if announced is None:
                return endpoint(sink)
            elsewhere.append(Elsewhere(announced, endpoint, sink))
            return elsewhere[0]

        worker = DecodeWorker(name, loop, TRUST, config=DecodeConfig(lease_s=patience_s), endpoint=behind)
    address = await worker.start()
    pushed_to = [way.address for each in elsewhere for way in each.own]
    print(address, *pushed_to, flush=True)  # noqa: T201  # what the test waits for
    if await asyncio.to_thread(sys.stdin.readline):
        await worker.drain()
        print("drained", flush=True)  # noqa: T201
    await worker.stop()
    loop.stop()


if __name__ == "__main__":
    torch.set_num_threads(1)
    role, folder, patience_s, transport, *announced = sys.argv[1:]
    serving = serve(
        role, folder, float(patience_s), TransportName(transport), announced[0] if announced else None
    )
    asyncio.run(serving)
