"""A router whose event loop is busy takes calls up late, and loses none."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from pdserve.v1 import generation_pb2, generation_pb2_grpc
from tests.integration.router.harness import running

TIMEOUT_S = 100.0
_REQUEST = generation_pb2.GetModelRequest()


async def codes_of_calls_to_a_busy_router(
    model_dir: Path, num_calls: int, num_connections: int, busy_s: float
) -> Counter[grpc.StatusCode]:
    """All of them come while the router's loop does something else."""
    async with running(model_dir) as cluster:
        with ExitStack() as stack:
            stubs = [_stub(cluster.server.address, stack) for _ in range(num_connections)]
            # Their channels are connected.
            await asyncio.to_thread(_results, [stub.GetModel.future(_REQUEST) for stub in stubs])
            calls = [
                stubs[number % num_connections].GetModel.future(_REQUEST, timeout=TIMEOUT_S)
                for number in range(num_calls)
            ]
            _be_busy(busy_s)
            return Counter(await asyncio.to_thread(_results, calls))


def _be_busy(seconds: float) -> None:
    """The loop is the router's own."""
    time.sleep(seconds)


def _stub(address: str, stack: ExitStack) -> generation_pb2_grpc.GenerationStub:
    # Channels of one process to one address share a connection otherwise.
    options = [("grpc.use_local_subchannel_pool", 1)]
    return generation_pb2_grpc.GenerationStub(
        stack.enter_context(grpc.insecure_channel(address, options=options))
    )


def _results(
    calls: Sequence[grpc.CallFuture[generation_pb2.GetModelResponse]],
) -> list[grpc.StatusCode]:
    for call in calls:
        call.exception(TIMEOUT_S)
    return [call.code() for call in calls]


async def test_a_burst_beyond_a_thousand_calls_is_answered_call_by_call(model_dir: Path) -> None:
    assert await codes_of_calls_to_a_busy_router(model_dir, 3000, 4, busy_s=3.0) == {grpc.StatusCode.OK: 3000}


@pytest.mark.full
async def test_a_call_that_is_taken_up_after_half_a_minute_is_answered(model_dir: Path) -> None:
    assert await codes_of_calls_to_a_busy_router(model_dir, 10, 1, busy_s=32.0) == {grpc.StatusCode.OK: 10}
