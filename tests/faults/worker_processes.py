"""Workers as processes of their own (`worker_process.py`), which a test may stop and kill."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from pdserve.v1 import cluster_pb2, worker_pb2, worker_pb2_grpc
from tests.trusted import TRUST
from trust.channels import open_aio_channel

ROOT = Path(__file__).parents[2]
LEASE_S = 1.0
# A process needs some seconds of a core, and all of a fleet start at once.
START_S = 200.0


class Process:
    def __init__(self, process: asyncio.subprocess.Process, address: str, pushed_to: str = "") -> None:
        self.process = process
        # Where a decode worker really takes KV, if that was announced to be elsewhere.
        self.pushed_to = pushed_to
        self.channel = open_aio_channel(address, TRUST)
        self.address = address

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def drain(self) -> None:
        """It finishes what it has, and ends."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")

    def prefill_stub(self) -> worker_pb2_grpc.PrefillWorkerStub:
        return worker_pb2_grpc.PrefillWorkerStub(self.channel)

    async def status(self) -> cluster_pb2.WorkerStatus:
        stub = worker_pb2_grpc.WorkerStub(self.channel)
        return (await stub.Describe(worker_pb2.DescribeRequest(), timeout=5)).status

    async def until(self, is_so: Callable[[cluster_pb2.WorkerStatus], bool], timeout_s: float) -> None:
        began = time.monotonic()
        while not is_so(await self.status()):
            assert time.monotonic() - began < timeout_s, await self.status()
            await asyncio.sleep(0.02)  # the other process has no event to wait for


@asynccontextmanager
async def launch_worker(
    role: str,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    transport: str = "grpc",
    patience_s: float = LEASE_S,
    announced: str | None = None,
) -> AsyncIterator[Process]:
    """`patience_s`: D's with P (its lease), and P's with D. `announced`: where a D is to say that it takes
    KV, instead of where it does."""
    arguments = (role, str(folder), str(patience_s), transport, *([] if announced is None else [announced]))
    command = (sys.executable, "-m", "tests.faults.worker_process", *arguments)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe
    )
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), START_S)).decode()
        address, *pushed_to = line.split()
        launched = Process(process, address, *pushed_to)
        yield launched
        await launched.channel.close()
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.wait()


def has_nothing(status: cluster_pb2.WorkerStatus) -> bool:
    load = status.load
    return load.kv_blocks_used == load.num_reservations == load.num_transfers == load.num_running == 0
