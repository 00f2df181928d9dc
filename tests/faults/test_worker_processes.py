"""A worker's process is killed or stopped in the middle: the other has everything back in bounded time."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest

from pdserve.v1 import cluster_pb2, worker_pb2, worker_pb2_grpc
from pdserve.v1.errors import PdserveError, Unavailable
from tests.integration.workers.mini_router import WAIT_S, Answer, Decoder, Route, spec
from tests.unit.engine.driving import Reference, prompt

SCRIPT = Path(__file__).parent / "worker_process.py"
ROOT = SCRIPT.parents[2]
LEASE_S = 1.0


class Process:
    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.process = process
        self.channel = grpc.aio.insecure_channel(address)
        self.address = address

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

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


Launch = Callable[[str], Awaitable[Process]]


@asynccontextmanager
async def launch_worker(
    role: str, folder: Path, environment: Mapping[str, str] | None = None, transport: str = "grpc"
) -> AsyncIterator[Process]:
    arguments = (role, str(folder), str(LEASE_S), transport)
    command = (sys.executable, "-m", "tests.faults.worker_process", *arguments)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe
    )
    try:
        assert process.stdout is not None
        address = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().strip()
        launched = Process(process, address)
        yield launched
        await launched.channel.close()
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.wait()


@pytest.fixture(params=["grpc", "shm", pytest.param("collective", marks=pytest.mark.full)])
async def launch(folder: Path, request: pytest.FixtureRequest) -> AsyncIterator[Launch]:
    async with AsyncExitStack() as stack:
        yield lambda role: stack.enter_async_context(launch_worker(role, folder, transport=request.param))


async def begin(decoder: Decoder, prefill: Process, sequence: worker_pb2.SequenceSpec) -> asyncio.Task[None]:
    reserved = await decoder.reserve(sequence)
    stub = worker_pb2_grpc.PrefillWorkerStub(prefill.channel)
    pushing = Route(stub, decoder).push(sequence, reserved.reservation, Answer())
    return asyncio.create_task(pushing)


async def failure_of(decoder: Decoder, sequence: worker_pb2.SequenceSpec, timeout_s: float) -> PdserveError:
    queue = decoder.queue((sequence.transfer_id, sequence.epoch))
    output = await asyncio.wait_for(queue.get(), timeout_s)
    assert isinstance(output, PdserveError)
    return output


def has_nothing(status: cluster_pb2.WorkerStatus) -> bool:
    load = status.load
    return load.kv_blocks_used == load.num_reservations == load.num_transfers == load.num_running == 0


def has_only_quarantined(status: cluster_pb2.WorkerStatus) -> bool:
    """Nothing but what a stopped sender might still write, or send to where it was asked to."""
    load = status.load
    return load.num_running == 0 and load.kv_blocks_used == load.kv_blocks_quarantined


async def test_a_killed_or_stopped_prefill_worker_leaves_nothing_on_d(
    launch: Launch, folder: Path, request: pytest.FixtureRequest
) -> None:
    transport = request.node.callspec.params["launch"]
    decode, killed, stopped, good = await asyncio.gather(*(launch(r) for r in ("decode", *["prefill"] * 3)))
    decoder = await Decoder(decode.address, "router").opened()

    for number, (victim, blow, limit_s) in enumerate(
        [(killed, signal.SIGKILL, 1.0), (stopped, signal.SIGSTOP, LEASE_S + 1.0)]
    ):
        sequence = spec(prompt(1900, number), 20)
        pushing = await begin(decoder, victim, sequence)
        before = (await decode.status()).counters.kv_bytes_received
        await decode.until(lambda s, before=before: s.counters.kv_bytes_received > before, WAIT_S)  # type: ignore[misc]
        victim.send(blow)
        error = await failure_of(decoder, sequence, limit_s)
        assert isinstance(error, Unavailable)
        may_write = blow is signal.SIGSTOP and transport != "grpc"
        await decode.until(has_only_quarantined if may_write else has_nothing, 1.0)
        if blow is signal.SIGKILL:
            with pytest.raises(Unavailable):
                await pushing
            continue
        if transport == "shm":
            status = await decode.status()
            (told,) = status.quarantines
            assert told.sender_pid == victim.process.pid
            assert told.num_blocks == status.load.kv_blocks_quarantined > 0
        # B takes the blocks that A had, or others where A's process might still write those. Then that goes
        # on, and finds itself shut out.
        reference = Reference(folder)
        b = spec(prompt(1900, 7), 20)
        stub = worker_pb2_grpc.PrefillWorkerStub(good.channel)
        answering = asyncio.create_task(Route(stub, decoder).generate(b))
        victim.send(signal.SIGCONT)
        reference.assert_follows(prompt(1900, 7), (await answering).ids)
        with pytest.raises(PdserveError):
            await pushing
        await victim.until(has_nothing, 3.0)
        await decode.until(has_nothing, 3.0)

    assert (await decode.status()).counters.num_expired_leases == 1
    await decoder.close()


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_killed_or_stopped_decode_worker_leaves_nothing_on_p(
    launch: Launch, folder: Path, blow: signal.Signals
) -> None:
    decode, prefill = await asyncio.gather(launch("decode"), launch("prefill"))
    decoder = await Decoder(decode.address, "router").opened()
    sequence = spec(prompt(1900), 20)
    pushing = await begin(decoder, prefill, sequence)
    await decode.until(lambda s: s.counters.kv_bytes_received > 0, WAIT_S)
    decode.send(blow)
    with pytest.raises(Unavailable):  # SIGSTOP: by the sender's ack timeout of a second
        await asyncio.wait_for(pushing, 5)
    await prefill.until(has_nothing, 3.0)
    await decoder.close()
