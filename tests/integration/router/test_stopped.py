"""A worker's process is stopped, not dead: its connection stays open and nothing comes."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path

from pdserve.client import Delta
from pdserve.v1 import cluster_pb2
from tests.integration.router.harness import running, until
from tests.scripted_workers import expected

REPOSITORY = Path(__file__).parents[3]


async def start(name: str) -> tuple[asyncio.subprocess.Process, cluster_pb2.WorkerStatus]:
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.scripted_process", name, stdin=pipe, stdout=pipe, cwd=REPOSITORY
    )
    assert child.stdout is not None
    line = await asyncio.wait_for(child.stdout.readline(), 20)
    return child, cluster_pb2.WorkerStatus.FromString(bytes.fromhex(line.decode()))


async def test_a_stopped_workers_streams_go_on_elsewhere(model_dir: Path) -> None:
    children = [await start(f"colocated-{number}") for number in range(2)]
    try:
        async with running(model_dir, num_prefills=0, num_decodes=0) as cluster:
            pool = cluster_pb2.PoolStatus(role=cluster_pb2.ROLE_COLOCATED, target=2)
            pool.workers.extend(status for _, status in children)
            await cluster.control.show([pool])
            await until(lambda: sum(worker.is_usable for worker in cluster.router.table.all()) == 2)
            seen: list[int] = []
            longest_pause_s, last = 0.0, time.monotonic()
            async for event in cluster.client.generate_stream([1, 2], max_tokens=40, seed=1):
                now = time.monotonic()
                longest_pause_s, last = max(longest_pause_s, now - last), now
                if isinstance(event, Delta):
                    seen.extend(event.token_ids)
                if len(seen) == 5:
                    busy = next(worker for worker in cluster.router.table.all() if worker.holdings.decoding)
                    (child,) = (c for c, s in children if s.instance_id == busy.info.instance_id)
                    child.send_signal(signal.SIGSTOP)
            assert tuple(seen) == expected([1, 2], 1, 40)
            assert 1 < longest_pause_s < 8
            answer = await cluster.client.generate([3], max_tokens=5, seed=1)
            assert answer.token_ids == expected([3], 1, 5)
    finally:
        for child, _ in children:
            child.kill()
            await child.communicate()
