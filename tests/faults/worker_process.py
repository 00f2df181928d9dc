"""A worker in a process of its own, to be killed or stopped:
`worker_process.py ROLE MODEL_FOLDER PATIENCE_S TRANSPORT`.

Prints its address when it serves; ends when its stdin closes.
"""

from __future__ import annotations

import asyncio
import os
import sys
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
from prefill_worker.config import PrefillConfig
from prefill_worker.worker import PrefillWorker

# Small chunks and frames, so that there is a middle to be killed in.
ENGINE = EngineConfig(num_blocks=256, max_num_batched_tokens=16)


async def serve(role: str, folder: str, patience_s: float, transport: TransportName) -> None:
    memory = PoolMemory()
    allocate = memory if transport in SHARES_MEMORY else allocate_memory
    engine = Engine.load(ModelConfig(id=folder, device="cpu"), ENGINE, allocate=allocate)
    loop = EngineLoop(engine)
    loop.start()
    worker: PrefillWorker | DecodeWorker
    name = f"{role}-{os.getpid()}"
    if role == "prefill":
        sender = SenderConfig(frame_bytes=1, ack_timeout_s=patience_s)
        transports = make_transports(engine.pool, 5.0)
        worker = PrefillWorker(name, loop, config=PrefillConfig(sender=sender), transports=transports)
    else:
        endpoint = partial(make_endpoint, transport, engine.pool, memory, "127.0.0.1")
        worker = DecodeWorker(name, loop, config=DecodeConfig(lease_s=patience_s), endpoint=endpoint)
    print(await worker.start(), flush=True)  # noqa: T201  # what the test waits for
    await asyncio.to_thread(sys.stdin.read)
    await worker.stop()
    loop.stop()


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(serve(sys.argv[1], sys.argv[2], float(sys.argv[3]), TransportName(sys.argv[4])))
