"""A worker's process is killed or stopped in the middle: the other has everything back in bounded time."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from pdserve.v1 import cluster_pb2, worker_pb2, worker_pb2_grpc
from pdserve.v1.errors import PdserveError, Unavailable
from tests.faults.worker_processes import LEASE_S, Process, has_nothing, launch_worker
from tests.integration.workers.mini_router import WAIT_S, Answer, Decoder, Route, spec
from tests.unit.engine.driving import Reference, prompt

Launch = Callable[[str], Awaitable[Process]]


@pytest.fixture(
    params=["shm", *(pytest.param(name, marks=pytest.mark.full) for name in ("grpc", "collective"))]
)
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


@pytest.mark.parametrize("blow", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)])
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
