"""A bad request is refused by its own fault's name, disturbs nobody, and the next good one works."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from engine.loading import LoadedModel
from pdserve.client import InvalidArgument, NotFound, Role, Unavailable, Unimplemented
from pdserve.v1 import generation_pb2, worker_pb2
from pdserve.v1.errors import MAX_MESSAGE_BYTES, from_rpc_error, to_status
from tests.integration.workers.mini_router import Answer, Cluster, route, spec
from tests.serving import Serving, serving
from tests.unit.engine.driving import prompt

GENERATE = "/pdserve.v1.Generation/Generate"
STREAM = "/pdserve.v1.Generation/GenerateStream"
LARGE = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
Message = generation_pb2.GenerateRequest


@pytest.fixture
async def serves(folder: Path, loaded: LoadedModel) -> AsyncIterator[Serving]:
    async with serving(folder, loaded) as cluster:
        yield cluster


async def good(serves: Serving) -> None:
    """Another client's request, while something is wrong: it is answered, and soon."""
    answer = await asyncio.wait_for(
        serves.client.generate(prompt(9), max_tokens=3, ignore_eos=True), timeout=3
    )
    assert len(answer.token_ids) == 3


BAD: dict[str, tuple[object, dict[str, object]]] = {
    "empty text": ("", {}),
    "no tokens": ([], {}),
    "no messages": ([{"role": "", "content": ""}], {}),
    "5000 messages": ([{"role": "user", "content": ""}] * 5000, {}),
    "bytes": (b"abc", {}),
    "a number": (5, {}),
    "None": (None, {}),
    "tokens of text": (["a", 1], {}),
    "half tokens": ([1.5], {}),
    "messages of parts": ([{"role": "user", "content": [{"type": "text"}]}], {}),
    "id = vocabulary": ([512], {}),
    "id 2**32-1": ([2**32 - 1], {}),
    "id 2**32": ([2**32], {}),
    "id -1": ([-1], {}),
    "10 MB of text": ("x" * 10_000_000, {}),
    "half a surrogate": ("\ud800", {}),
    "half a surrogate as stop": ("x", {"stop": "\udfff"}),
    "half a surrogate as name": ("x", {"request_id": "\udfff"}),
    "a name of 2 KB": ("x", {"request_id": "x" * 2000}),
    "max_tokens 0": ("x", {"max_tokens": 0}),
    "max_tokens -1": ("x", {"max_tokens": -1}),
    "max_tokens 2**31-1": ("x", {"max_tokens": 2**31 - 1}),
    "max_tokens 2**31": ("x", {"max_tokens": 2**31}),
    "max_tokens text": ("x", {"max_tokens": "5"}),
    "min_tokens over max": ("x", {"min_tokens": 6, "max_tokens": 5}),
    "nothing left to draw": ("x", {"min_tokens": 1, "stop_token_ids": range(512)}),
    "NaN temperature": ("x", {"temperature": math.nan}),
    "infinite temperature": ("x", {"temperature": math.inf}),
    "temperature -1": ("x", {"temperature": -1.0}),
    "top_p 2": ("x", {"top_p": 2.0}),
    "top_p 0": ("x", {"top_p": 0.0}),
    "top_p NaN": ("x", {"top_p": math.nan}),
    "top_k -1": ("x", {"top_k": -1}),
    "min_p NaN": ("x", {"min_p": math.nan}),
    "seed 2**64": ("x", {"seed": 2**64}),
    "seed -1": ("x", {"seed": -1}),
    "repetition_penalty 1e-38": ("x", {"repetition_penalty": 1e-38}),
    "presence_penalty inf": ("x", {"presence_penalty": math.inf}),
    "NaN bias": ("x", {"logit_bias": {1: math.nan}}),
    "bias beyond arithmetic": ("x", {"logit_bias": {1: 3e38}}),
    "bias outside": ("x", {"logit_bias": {512: 1.0}}),
    "stop id outside": ("x", {"stop_token_ids": [512]}),
    "empty stop": ("x", {"stop": ""}),
    "stop number": ("x", {"stop": 5}),
    "n 0": ("x", {"n": 0}),
    "n 17": ("x", {"n": 17}),
    "logprobs 21": ("x", {"logprobs": 21}),
    "timeout NaN": ("x", {"timeout": math.nan}),
}


async def test_what_no_server_can_answer_is_an_invalid_argument(serves: Serving) -> None:
    for name, (bad, options) in BAD.items():
        with pytest.raises(InvalidArgument):
            pytest.fail(f"{name}: {await serves.client.generate(bad, **options)}")  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument):
            await serves.client.generate_stream(bad, **options).__anext__()  # type: ignore[arg-type]
        await good(serves)
    with pytest.raises(NotFound):
        await serves.client.generate("x", model="other" * 10_000)
    with pytest.raises(Unimplemented):
        await serves.client.generate("x", prompt_logprobs=True)


async def test_a_keyword_that_there_is_not_is_no_default_in_silence(serves: Serving) -> None:
    with pytest.raises(TypeError, match=r"max_token$"):
        await serves.client.generate("x", max_token=5)  # type: ignore[call-arg]


async def test_what_is_only_odd_is_answered(serves: Serving) -> None:
    odd: list[dict[str, object]] = [
        {"temperature": 1e-45},
        {"temperature": 1e-9, "seed": 2**64 - 1},
        {"temperature": 3e38},
        {"top_k": 2**31 - 1, "top_p": 1e-45, "min_p": 1.0},
        {"temperature": 0.5, "logit_bias": dict.fromkeys(range(512), -1e9)},
        {"temperature": 0.5, "logit_bias": dict.fromkeys(range(508), 1e9), "repetition_penalty": 0.001},
        {"min_tokens": 5, "stop_token_ids": range(500), "ignore_eos": True},
        {"stop": ["\0", "\U0001f600", "a" * 1024]},
        {"stop": None, "logit_bias": None, "stop_token_ids": None, "temperature": None},
        {"timeout": math.inf},
    ]
    for options in odd:
        for text in ("hello", "\0\n\0", "\U0001f600" * 50):
            answer = await serves.client.generate(text, max_tokens=5, **options)  # type: ignore[arg-type]
            assert answer.token_ids, options
    for messages in ([("wizard", "hi")], [("user", "")], [("system", "\0"), ("system", "\0")]):
        chat = [{"role": role, "content": content} for role, content in messages]
        assert (await serves.client.generate(chat, max_tokens=2, ignore_eos=True)).token_ids


RAW = {
    "bytes that are no message": b"\xff" * 40,
    "a cut length": b"\x1a\x7f",
    "invalid UTF-8 as prompt": b"\x1a\x02\xff\xfe",
    "invalid UTF-8 as name": b"\x0a\x01\xff\x1a\x02hi",
    "invalid UTF-8 in a chat": b"\x2a\x08\x0a\x06\x0a\x01u\x12\x01\xc3",
    "groups without an end": b"\x9b\x06" * 1000,
    "nothing": b"",
    "text of the wrong kind": b"\x18\x05",
}


async def test_raw_bytes_are_an_invalid_argument_on_every_method(serves: Serving) -> None:
    async with grpc.aio.insecure_channel(serves.server.address, options=LARGE) as channel:
        for name, raw in RAW.items():
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                pytest.fail(f"{name}: {await channel.unary_unary(GENERATE)(raw, timeout=5)}")
            assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT, name
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await channel.unary_stream(STREAM)(raw, timeout=5).read()
            assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT, name
            await good(serves)
        for method in ("ScalePool", "DrainWorker"):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await channel.unary_unary(f"/pdserve.v1.Admin/{method}")(b"\xff" * 9, timeout=5)
            assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await channel.unary_unary("/pdserve.v1.Generation/Nothing")(b"", timeout=5)
        assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED


def field(number: int, raw: bytes) -> bytes:
    """One field of bytes, on the wire."""
    parts, length = [], len(raw)
    for value in (number << 3 | 2, length):
        while value > 127:
            parts.append(value & 127 | 128)
            value >>= 7
        parts.append(value)
    return bytes(parts) + raw


async def test_a_flood_of_empty_parts_costs_the_router_neither_time_nor_memory(serves: Serving) -> None:
    """A few bytes each on the wire, some hundred in memory: they must not be unpacked."""
    floods = {
        "messages": field(5, field(1, field(1, b"a")) * 1_500_000),
        "empty messages": field(5, field(1, b"") * 4_000_000),
        "stops": field(3, b"hi") + field(7, field(3, b"") * 4_000_000),
        "ids": field(4, field(1, b"\1" * 8_000_000)),
        "unknown": field(3, b"hi") + field(1000, b"\0" * 8_000_000),
    }
    async with grpc.aio.insecure_channel(serves.server.address, options=LARGE) as channel:
        for name, raw in floods.items():
            began = time.process_time()
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await channel.unary_unary(GENERATE)(raw, timeout=5)
            assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "at most" in (failed.value.details() or ""), name
            assert time.process_time() - began < 0.5, name
            await good(serves)


async def test_a_prompt_of_the_longest_kind_is_refused_by_name_also_where_much_is_allowed(
    folder: Path, loaded: LoadedModel
) -> None:
    async with serving(folder, loaded, router={"max_prompt_bytes": 24 << 20}) as serves:
        with pytest.raises(InvalidArgument, match=r"prompt\.text: 25165825 bytes"):
            await serves.client.generate("x" * ((24 << 20) + 1))
        with pytest.raises(InvalidArgument, match="over 1024 tokens"):
            await serves.client.generate([1] * (5 << 20), max_tokens=1)
        await good(serves)


async def test_every_refusal_can_be_sent_whatever_it_repeats(serves: Serving) -> None:
    """gRPC drops a status that is too long; what the client then sees is no longer the error."""
    for _ in range(50):
        with pytest.raises(NotFound) as refused:
            await serves.client.generate("x", model="\U0001f600" * 5000)
        assert refused.value.reason == "MODEL"
        assert len(refused.value.message.encode()) < MAX_MESSAGE_BYTES + 10
        with pytest.raises(NotFound) as refused:
            await serves.client.drain_worker("\U0001f600" * 5000)


async def test_details_that_contradict_their_status_are_left_out() -> None:
    """A proxy may reword a status, and leave the details of the first one in it."""
    status = status_pb2.Status(code=5, message="another one")
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason="X"))
    status.details.append(detail)
    metadata = rpc_status.to_status(status).trailing_metadata
    name = metadata[0][0]
    broken = status_pb2.Status(code=5, message="reworded")
    for kind in (error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo):
        broken.details.add(type_url=f"type.googleapis.com/{kind.DESCRIPTOR.full_name}", value=b"\xff\xff")
    for trailing in (metadata, ((name, b"\xff\xff\xff"),), ((name, broken.SerializeToString()),)):
        failed = grpc.aio.AioRpcError(
            grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), "reworded"
        )
        error = from_rpc_error(failed)
        assert (type(error), error.message, error.reason) == (NotFound, "reworded", "NOT_FOUND")
    assert to_status(NotFound("\ud800")).details == "?"


async def test_a_controller_that_is_gone_or_silent_is_told_from_a_router_that_is(serves: Serving) -> None:
    await serves.control.stop()
    with pytest.raises(Unavailable, match="controller") as lost:
        await serves.client.get_cluster(timeout=5)
    assert lost.value.reason == "CONTROLLER_LOST"
    await good(serves)
    await serves.control.start()


async def test_dropped_half_open_and_foreign_connections_disturb_nobody(serves: Serving) -> None:
    host, port = serves.server.address.split(":")
    greetings = [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0" + b"\xff" * 9000,
        b"",
    ]
    writers = []
    for greeting in greetings * 10:
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(greeting)
        writers.append(writer)
    await good(serves)
    for writer in writers:
        writer.transport.abort()
    async with grpc.aio.insecure_channel(serves.server.address, options=LARGE) as channel:
        request = Message(text="hello", stop=generation_pb2.StopConditions(max_tokens=200, ignore_eos=True))
        calls = [channel.unary_stream(STREAM)(request.SerializeToString()) for _ in range(200)]
        reads = [asyncio.ensure_future(call.read()) for call in calls]
        await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
        for call in calls[::2]:
            call.cancel()
    await asyncio.gather(*reads, return_exceptions=True)
    await good(serves)  # the fixture sees to it that nothing is left of them


async def test_admin_refuses_what_there_is_not(serves: Serving) -> None:
    with pytest.raises(InvalidArgument):
        await serves.client.scale_pool(Role.DECODE, 2**32)
    with pytest.raises(NotFound):
        await serves.client.drain_worker("")


async def test_a_workers_caller_that_checks_nothing_harms_its_own_sequence_only(cluster: Cluster) -> None:
    """What a router would have refused reaches the workers: others in the same step go on."""
    way = await route(cluster, num_blocks=200)
    fine = asyncio.create_task(way.generate(spec(prompt(20), 200)))

    async def harms(change: str) -> None:
        held = spec(prompt(30), 5)
        reservation = (await way.decoder.reserve(held)).reservation
        sequence = spec(prompt(30), 5, transfer_id=held.transfer_id)
        sequence.sampling.temperature = 1.0
        spoil(sequence, change)
        with pytest.raises(InvalidArgument):
            await way.push(sequence, reservation, Answer())
        sequence.transfer_id += "-"
        with pytest.raises(InvalidArgument):
            await way.decoder.reserve(sequence)
        await way.decoder.release(held)

    for change in ("top_k", "bias", "stop id", "nan", "top_p"):
        await harms(change)
    assert len((await fine).ids) == 200


def spoil(sequence: worker_pb2.SequenceSpec, change: str) -> None:
    sampling = sequence.sampling
    if change == "top_k":
        sampling.top_k = -5
    elif change == "bias":
        sampling.logit_bias[99_999] = 1.0
    elif change == "stop id":
        sequence.stop.stop_token_ids.append(99_999)
        sequence.stop.min_tokens = 2
    elif change == "nan":
        sampling.temperature = math.nan
    else:
        sampling.top_p = -1.0


async def test_a_control_message_over_four_mebibytes_passes(cluster: Cluster) -> None:
    """gRPC's default limit is 4 MiB: a long prompt must not meet it on one side only."""
    way = await route(cluster)
    long = spec([1] * 5_000_000, 1)
    with pytest.raises(InvalidArgument, match="5000001 tokens"):
        await way.decoder.reserve(long)
    reserved = await way.decoder.reserve(spec(prompt(20), transfer_id=long.transfer_id))
    with pytest.raises(InvalidArgument, match="2 blocks are reserved"):
        await way.push(long, reserved.reservation, Answer())
    await way.decoder.release(long)
