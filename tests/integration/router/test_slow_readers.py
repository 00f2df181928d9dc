"""Clients that read nothing: what is kept for them is bounded, and nobody else waits for them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from pdserve.v1 import errors, generation_pb2, generation_pb2_grpc
from tests.integration.router.harness import Cluster, running, until
from tests.scripted_workers import expected

# A stream takes a few tokens before its client reads, and no more.
NARROW = (("grpc.http2.lookahead_bytes", 64), ("grpc.http2.bdp_probe", 0), ("grpc.enable_http_proxy", 0))
NUM_STREAMS = 500
NUM_TOKENS = 60
LIMIT = 1000

Call = grpc.aio.UnaryStreamCall[generation_pb2.GenerateRequest, generation_pb2.GenerateStreamResponse]


def unread(cluster: Cluster) -> int:
    return sum(attempt.inbox.num_unread for attempt in cluster.router._dispatcher._attempts.values())


async def ending(call: Call) -> tuple[int, errors.PdserveError | None]:
    """How many tokens came, and how it ended."""
    num_tokens = 0
    try:
        async for message in call:
            num_tokens += len(message.delta.token_ids)
    except grpc.aio.AioRpcError as error:
        return num_tokens, errors.from_rpc_error(error)
    return num_tokens, None


async def test_five_hundred_streams_that_nobody_reads_are_bounded_and_stall_nobody(model_dir: Path) -> None:
    async with running(
        model_dir, num_decodes=2, max_queued_requests=1000, max_unread_tokens=LIMIT
    ) as cluster:
        for decode in cluster.decodes:
            decode.num_blocks = 10_000
        async with grpc.aio.insecure_channel(cluster.server.address, options=NARROW) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            request = generation_pb2.GenerateRequest(
                token_ids=generation_pb2.TokenIds(ids=[1, 2]),
                stop=generation_pb2.StopConditions(max_tokens=NUM_TOKENS),
            )
            calls: list[Call] = [stub.GenerateStream(request, timeout=100) for _ in range(NUM_STREAMS)]
            # The workers have done all that they were to do: they waited for no reader.
            await until(lambda: sum(decode.num_reserves for decode in cluster.decodes) == NUM_STREAMS, 60.0)
            await until(lambda: not any(decode.reserved for decode in cluster.decodes), 60.0)
            await until(lambda: unread(cluster) <= LIMIT, 20.0)
            await until(lambda: cluster.router._dispatcher.slow_readers.num_cut > 0, 20.0)
            answer = await cluster.client.generate([3], max_tokens=NUM_TOKENS, seed=1, timeout=60)
            assert answer.token_ids == expected([3], 1, NUM_TOKENS)
            endings = await asyncio.gather(*(ending(call) for call in calls))
        assert len(endings) == NUM_STREAMS
        for num_tokens, error in endings:
            if error is None:
                assert num_tokens == NUM_TOKENS
            else:
                assert (type(error), error.reason) == (errors.ResourceExhausted, "SLOW_READER")
        num_cut = sum(error is not None for _, error in endings)
        assert 0 < num_cut < NUM_STREAMS


async def test_who_is_furthest_behind_is_cut_and_nobody_else(model_dir: Path) -> None:
    async with (
        running(model_dir, max_unread_tokens=200) as cluster,
        grpc.aio.insecure_channel(cluster.server.address, options=NARROW) as channel,
    ):
        stub = generation_pb2_grpc.GenerationStub(channel)
        calls: list[Call] = []
        for number, num_tokens in enumerate((40, 300), 1):
            request = generation_pb2.GenerateRequest(
                token_ids=generation_pb2.TokenIds(ids=[number]),
                stop=generation_pb2.StopConditions(max_tokens=num_tokens),
            )
            calls.append(stub.GenerateStream(request, timeout=100))
            # All of the short one waits at the router before the long one comes.
            await until(lambda: cluster.d.num_tokens >= 40, 60.0)
        await until(lambda: cluster.router._dispatcher.slow_readers.num_cut > 0, 60.0)
        (num_short, short), (num_long, long) = [await ending(call) for call in calls]
        assert (num_short, short) == (40, None)
        assert num_long < 300
        assert isinstance(long, errors.ResourceExhausted)
        assert (long.reason, cluster.router._dispatcher.slow_readers.num_cut) == ("SLOW_READER", 1)


async def test_a_client_that_takes_nothing_until_its_time_is_over_hears_that_when_it_reads(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        running(model_dir, default_timeout_s=1.0) as cluster,
        grpc.aio.insecure_channel(cluster.server.address, options=NARROW) as channel,
    ):
        stub = generation_pb2_grpc.GenerationStub(channel)
        request = generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=[1, 2]),
            stop=generation_pb2.StopConditions(max_tokens=300),
        )
        call: Call = stub.GenerateStream(request)
        await until(lambda: cluster.d.num_tokens > 100, 30.0)
        # Nothing is held for it, neither here nor on the workers.
        await until(lambda: not cluster.router._dispatcher._attempts and not cluster.d.reserved, 30.0)
        num_tokens, error = await asyncio.wait_for(ending(call), 30)
        assert num_tokens < 300
        assert isinstance(error, errors.DeadlineExceeded)
    ours = [record for record in caplog.records if record.name.startswith("router")]
    assert not [record for record in ours if "bug" in record.message]


async def test_a_client_that_reads_late_gets_everything_while_there_is_room(cluster: Cluster) -> None:
    async with grpc.aio.insecure_channel(cluster.server.address, options=NARROW) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        request = generation_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=[1, 2]),
            stop=generation_pb2.StopConditions(max_tokens=300),
        )
        call: Call = stub.GenerateStream(request, timeout=60)
        await until(lambda: cluster.d.num_tokens == 300, 60.0)
        assert unread(cluster) > 100
        assert await ending(call) == (300, None)
