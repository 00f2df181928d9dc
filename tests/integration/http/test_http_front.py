"""The HTTP front on scripted workers: what is refused and how, cancels, deadlines, health, the end."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from pdserve.v1 import cluster_pb2
from pdserve.v1.errors import DataLoss, ResourceExhausted, Unavailable
from router.bind import CannotBind
from router.front.server import RouterServer
from router.http.openai_api import TIMEOUT_HEADER
from router.router import Router
from tests.integration.http.raw import connect, get, post, read_answer, request, send
from tests.integration.http.sdk import sdk
from tests.integration.router.harness import Cluster, running, until
from tests.scripted_workers import expected

LONG = {"prompt": [1, 2], "max_tokens": 300, "stream": True}


@pytest_asyncio.fixture
async def cluster(model_dir: Path) -> AsyncIterator[Cluster]:
    async with running(model_dir, http="127.0.0.1:0", max_queued_requests=2) as cluster:
        yield cluster


def address_of(cluster: Cluster) -> str:
    address = cluster.server.http_address
    assert address is not None
    return address


@pytest_asyncio.fixture
async def client(cluster: Cluster) -> AsyncIterator[AsyncOpenAI]:
    async with sdk(address_of(cluster)) as client:
        yield client


BAD: dict[str, tuple[str, str, int, str | None, str | None]] = {
    # path, body, status, param, code
    "no JSON": ("completions", "{", 400, None, None),
    "no object": ("completions", "[]", 400, None, None),
    "half a surrogate": ("completions", r'{"prompt": "\ud800"}', 400, None, None),
    "no prompt": ("completions", "{}", 400, "prompt", None),
    "an empty prompt": ("completions", '{"prompt": ""}', 400, "prompt", None),
    "an empty list": ("completions", '{"prompt": []}', 400, "prompt", None),
    "a list of everything": ("completions", '{"prompt": [1, "a", [2]]}', 400, "prompt", None),
    "a negative id": ("completions", '{"prompt": [-1]}', 400, "prompt", None),
    "an id outside": ("completions", '{"prompt": [512]}', 400, "prompt", None),
    "too many prompts": ("completions", '{"prompt": ["a", "b", "c"]}', 400, "prompt", None),
    "max_tokens 0": ("completions", '{"prompt": "x", "max_tokens": 0}', 400, "max_tokens", None),
    "n 0": ("completions", '{"prompt": "x", "n": 0}', 400, "n", None),
    "n -1": ("completions", '{"prompt": "x", "n": -1}', 400, "n", None),
    "n 1000": ("completions", '{"prompt": "x", "n": 1000}', 400, "n", None),
    "NaN": ("completions", '{"prompt": "x", "temperature": NaN}', 400, "temperature", None),
    "a wrong type": ("completions", '{"prompt": "x", "top_p": "much"}', 400, "top_p", None),
    "a huge seed": ("completions", '{"prompt": "x", "seed": 18446744073709551616}', 400, "seed", None),
    "a context that is too long": (
        "completions",
        '{"prompt": "x", "max_tokens": 500}',
        400,
        "max_tokens",
        "context_length_exceeded",
    ),
    "echo": ("completions", '{"prompt": "x", "echo": true}', 400, "echo", "unimplemented"),
    "no messages": ("chat/completions", '{"messages": []}', 400, "messages", None),
    "max_completion_tokens 0": (
        "chat/completions",
        '{"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 0}',
        400,
        "max_completion_tokens",
        None,
    ),
    "a stream that is too long": (
        "chat/completions",
        '{"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 500, "stream": true}',
        400,
        "max_completion_tokens",
        "context_length_exceeded",
    ),
    "an image": (
        "chat/completions",
        '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}',
        400,
        "messages",
        "unimplemented",
    ),
    "top_logprobs alone": (
        "chat/completions",
        '{"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}',
        400,
        "top_logprobs",
        None,
    ),
    "another model": ("completions", '{"model": "m", "prompt": "x"}', 404, None, "model_not_found"),
    "too large a prompt": (
        "completions",
        json.dumps({"prompt": "x" * (5 << 20)}),
        413,
        "prompt",
        "prompt_too_large",
    ),
    "too large a body": ("completions", " " * (14 << 20), 413, None, "body_too_large"),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_request_is_refused_in_openais_shape_and_the_next_good_one_works(
    cluster: Cluster, name: str
) -> None:
    path, body, status, param, code = BAD[name]
    answer = await post(address_of(cluster), f"/v1/{path}", body.encode())
    assert (answer.status, answer.error["param"], answer.error["code"]) == (status, param, code)
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["message"]
    assert answer.headers["x-should-retry"] == "false"
    good = await post(address_of(cluster), "/v1/completions", b'{"prompt": [1], "seed": 1, "max_tokens": 3}')
    assert good.status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bad_request_is_refused_alike_with_and_without_streaming(
    cluster: Cluster, stream: bool
) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 500, "stream": stream}).encode()
    answer = await post(address_of(cluster), "/v1/completions", body)
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")


async def test_other_media_types_paths_and_methods_are_refused_in_the_same_shape(cluster: Cluster) -> None:
    address = address_of(cluster)
    for kind in ("text/plain", "text/plain,x+json", "multipart/form-data;+json", ""):
        plain = await post(address, "/v1/completions", b'{"prompt": "x"}', {"content-type": kind})
        assert (plain.status, plain.error["code"]) == (415, "media_type")
    unknown = await get(address, "/v1/embeddings")
    assert (unknown.status, unknown.error["code"]) == (404, "not_found")
    wrong = await get(address, "/v1/completions")
    assert (wrong.status, wrong.error["code"]) == (405, "method_not_allowed")


async def test_a_full_queue_is_a_429_that_says_when_to_come_back(cluster: Cluster) -> None:
    cluster.p.hold_token.clear()
    address = address_of(cluster)
    body = json.dumps({"prompt": [1] * 300, "max_tokens": 2}).encode()
    waiting = [asyncio.ensure_future(post(address, "/v1/completions", body)) for _ in range(40)]
    done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=20)
    refused = done.pop().result()
    assert (refused.status, refused.error["type"]) == (429, "rate_limit_error")
    assert refused.error["code"] == "queue_full"
    assert int(refused.headers["retry-after"]) >= 1
    assert int(refused.headers["retry-after-ms"]) >= 1
    assert refused.headers["x-should-retry"] == "true"
    cluster.p.hold_token.set()
    answers = await asyncio.gather(*waiting)
    assert {answer.status for answer in answers} == {200, 429}


async def test_a_deadline_that_passes_is_a_408_and_nothing_is_left(cluster: Cluster) -> None:
    cluster.p.hold_token.clear()
    for stream in (False, True):
        body = json.dumps({"prompt": [1], "stream": stream}).encode()
        answer = await post(address_of(cluster), "/v1/completions", body, {TIMEOUT_HEADER: "0.1"})
        assert (answer.status, answer.error["type"]) == (408, "timeout_error")
        assert answer.headers["x-should-retry"] == "false"
    wrong = await post(address_of(cluster), "/v1/completions", body, {TIMEOUT_HEADER: "soon"})
    assert wrong.status == 400
    cluster.p.hold_token.set()
    await until(cluster.is_idle)


@pytest.mark.parametrize("body", [b'{"prompt": [1]}', b'{"prompt": [1], "n": 2}', b'{"prompt": [[1], [2]]}'])
async def test_no_room_in_time_is_a_429(cluster: Cluster, body: bytes) -> None:
    cluster.d.reserve_error = ResourceExhausted("no blocks")
    answer = await post(address_of(cluster), "/v1/completions", body, {TIMEOUT_HEADER: "1"})
    assert (answer.status, answer.error["code"]) == (429, "no_room")
    assert "retry-after" in answer.headers


async def test_a_closed_connection_cancels_a_stream(cluster: Cluster) -> None:
    cluster.d.step_s = 0.01
    reader, writer = await send(address_of(cluster), "/v1/completions", json.dumps(LONG).encode())
    await asyncio.wait_for(reader.readuntil(b"data: "), 5)
    assert cluster.d.reserved
    writer.close()
    await until(cluster.is_idle)
    assert cluster.d.num_tokens < 300


@pytest.mark.parametrize("stream", [False, True])
async def test_a_closed_connection_cancels_what_has_not_answered_yet(cluster: Cluster, stream: bool) -> None:
    cluster.p.hold_token.clear()
    body = json.dumps({"prompt": [1, 2], "max_tokens": 300, "stream": stream, "n": 2}).encode()
    _, writer = await send(address_of(cluster), "/v1/completions", body)
    await until(lambda: cluster.p.num_prefills > 0)
    writer.close()
    await until(cluster.is_idle)
    assert cluster.p.num_cancelled > 0
    cluster.p.hold_token.set()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_closed_connection_cancels_though_more_requests_wait_on_it(
    cluster: Cluster, stream: bool
) -> None:
    cluster.d.step_s = 0.01
    body = json.dumps({"prompt": [1], "max_tokens": 300, "stream": stream}).encode()
    _, writer = await connect(address_of(cluster))
    writer.write(request("/v1/completions", body) * 3)
    await until(lambda: cluster.d.num_tokens > 0)
    writer.close()
    await until(cluster.is_idle)
    assert cluster.d.num_tokens < 300
    assert cluster.p.num_prefills == 1


async def test_a_closed_connection_cancels_every_prompt_of_a_list(cluster: Cluster) -> None:
    cluster.d.step_s = 0.01
    body = json.dumps({"prompt": [[1], [2]], "max_tokens": 300, "stream": True, "n": 2}).encode()
    reader, writer = await send(address_of(cluster), "/v1/completions", body)
    await asyncio.wait_for(reader.readuntil(b'"index":3'), 5)
    writer.close()
    await until(cluster.is_idle)
    assert cluster.d.num_tokens < 1200


async def test_the_sdks_close_cancels(cluster: Cluster, client: AsyncOpenAI) -> None:
    cluster.d.step_s = 0.01
    stream = await client.completions.create(model="tiny", prompt=[1], max_tokens=300, stream=True)
    async for _ in stream:
        break
    await stream.close()
    await until(cluster.is_idle)


async def test_a_slow_reader_holds_back_its_own_stream_only(cluster: Cluster) -> None:
    _, slow = await send(address_of(cluster), "/v1/completions", json.dumps(LONG).encode())
    body = json.dumps({"prompt": [5], "seed": 1, "max_tokens": 50, "return_token_ids": True}).encode()
    answer = await asyncio.wait_for(post(address_of(cluster), "/v1/completions", body), 10)
    assert tuple(answer.json["choices"][0]["token_ids"]) == expected([5], 1, 50)
    slow.close()


async def test_an_error_behind_tokens_ends_the_stream_without_done(
    cluster: Cluster, client: AsyncOpenAI
) -> None:
    cluster.d.step_s = 0.02
    soon = {TIMEOUT_HEADER: "0.5"}
    reader, writer = await send(address_of(cluster), "/v1/completions", json.dumps(LONG).encode(), soon)
    raw = (await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 10)).decode()
    writer.close()
    assert raw.startswith("HTTP/1.1 200")
    assert "timeout_error" in raw
    assert "[DONE]" not in raw
    with pytest.raises(openai.APIError, match="not done within"):
        async for _ in await client.completions.create(
            model="tiny",
            prompt=[1],
            max_tokens=300,
            stream=True,
            extra_headers=soon,
        ):
            pass


async def test_damaged_kv_is_a_500_and_lost_workers_are_a_503(cluster: Cluster) -> None:
    cluster.p.fail_always = DataLoss("the digest is wrong")
    damaged = await post(address_of(cluster), "/v1/completions", b'{"prompt": [1]}')
    assert (damaged.status, damaged.error["type"]) == (500, "server_error")
    cluster.p.fail_always = Unavailable("gone")
    spent = await post(address_of(cluster), "/v1/completions", b'{"prompt": [1]}')
    assert (spent.status, spent.error["code"]) == (503, "workers_lost")
    assert "retry-after" in spent.headers
    cluster.p.fail_always = None
    pools = cluster.pools()
    for pool in pools:
        pool.unrecoverable_reason = "no node is left"
        for worker in pool.workers:
            worker.state = cluster_pb2.WORKER_STATE_DEAD
    await cluster.control.show(pools)
    await until(lambda: not cluster.router.table.is_serving)
    lost = await post(address_of(cluster), "/v1/completions", b'{"prompt": [1]}')
    assert (lost.status, lost.error["type"]) == (503, "server_error")
    assert "no node is left" in str(lost.error["message"])
    assert "retry-after" in lost.headers


async def test_health_follows_what_could_be_served_and_live_stays(model_dir: Path) -> None:
    async with running(model_dir, http="127.0.0.1:0") as cluster:
        address = address_of(cluster)
        assert (await get(address, "/health")).status == 200
        assert (await get(address, "/live")).status == 200
        await cluster.p.stop()
        await until(lambda: not cluster.router.table.is_serving)
        sick = await get(address, "/health")
        assert (sick.status, sick.json["status"]) == (503, "not_serving")
        assert sick.json["reason"] == "workers are starting or being replaced"
        assert (await get(address, "/live")).status == 200
        await cluster.p.start()
        await until(lambda: cluster.router.table.is_serving)
        assert (await get(address, "/health")).status == 200


async def test_health_and_a_late_answer_name_the_pool_that_is_scaled_to_0(cluster: Cluster) -> None:
    pools = cluster.pools()
    for pool in pools:
        if pool.role == cluster_pb2.ROLE_DECODE:
            pool.target = 0
            pool.ClearField("workers")
    await cluster.control.show(pools)
    await until(lambda: not cluster.router.table.is_serving)
    sick = await get(address_of(cluster), "/health")
    assert (sick.status, sick.json["status"]) == (503, "not_serving")
    told = "decode is scaled to 0: requests wait until there is a worker"
    assert sick.json["reason"] == told
    body = b'{"prompt": [1], "max_tokens": 2}'
    late = await post(address_of(cluster), "/v1/completions", body, {TIMEOUT_HEADER: "0.3"})
    assert late.error["message"] == f"not done within 0.3 s: {told}"


async def test_a_request_id_is_echoed_and_names_the_answer(cluster: Cluster) -> None:
    body = b'{"prompt": [1], "max_tokens": 2}'
    answer = await post(address_of(cluster), "/v1/completions", body, {"x-request-id": "mine-7"})
    assert answer.headers["x-request-id"] == "mine-7"
    assert answer.json["id"] == "cmpl-mine-7"
    for refused in (b'{"prompt": [1], "n": 17}', b'{"prompt": [1], "n": 17, "stream": true}'):
        answer = await post(address_of(cluster), "/v1/completions", refused, {"x-request-id": "mine-8"})
        assert (answer.status, answer.headers["x-request-id"]) == (400, "mine-8")
        answer = await post(address_of(cluster), "/v1/completions", refused)
        assert len(answer.headers["x-request-id"]) == 32
    odd = json.dumps({"prompt": [1], "max_tokens": 2, "request_id": "a\r\nb: c"}).encode()
    answer = await post(address_of(cluster), "/v1/completions", odd)
    assert answer.status == 200
    assert "b" not in answer.headers
    assert answer.json["id"] == "cmpl-a\r\nb: c"


async def test_without_a_limit_a_chat_goes_on_to_the_end_of_the_context(cluster: Cluster) -> None:
    chat = b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}'
    answer = await post(address_of(cluster), "/v1/chat/completions", chat)
    assert answer.json["usage"]["total_tokens"] == cluster.router.max_model_len
    text = await post(address_of(cluster), "/v1/completions", b'{"prompt": "hi"}')
    assert text.json["usage"]["completion_tokens"] == 16


async def test_usage_so_far_is_in_every_chunk_where_it_is_asked_for(
    cluster: Cluster, client: AsyncOpenAI
) -> None:
    cluster.d.step_s = 0.01
    options: dict[str, object] = {"include_usage": True, "continuous_usage_stats": True}
    counts = []
    async for chunk in await client.completions.create(
        model="tiny", prompt=[1], max_tokens=5, stream=True, stream_options=options
    ):
        assert chunk.usage is not None
        counts.append(chunk.usage.completion_tokens)
    assert counts[0] == 1
    assert counts == sorted(counts)
    assert counts[-1] == 5


async def test_connections_are_kept_and_pipelined_requests_answered_in_order(cluster: Cluster) -> None:
    reader, writer = await connect(address_of(cluster))
    for seed in (1, 2):
        body = json.dumps({"prompt": [1], "max_tokens": 4, "seed": seed, "return_token_ids": True}).encode()
        writer.write(request("/v1/completions", body))
    for seed in (1, 2):
        answer = await read_answer(reader)
        assert tuple(answer.json["choices"][0]["token_ids"]) == expected([1], seed, 4)
    writer.close()


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
async def test_curl_just_works(cluster: Cluster) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": True})
    url = f"http://{address_of(cluster)}/v1/chat/completions"
    command = ("curl", "-sS", "--noproxy", "*", "-m", "20", url, "-H", "Content-Type: application/json")
    child = await asyncio.create_subprocess_exec(*command, "-d", body, stdout=asyncio.subprocess.PIPE)
    out, _ = await asyncio.wait_for(child.communicate(), 30)
    events = [line.removeprefix("data: ") for line in out.decode().splitlines() if line]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len("".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)) == 3


async def test_draining_lets_streams_end_and_ends_those_that_take_too_long(model_dir: Path) -> None:
    async with running(model_dir, http="127.0.0.1:0") as cluster:
        cluster.d.step_s = 0.02
        address = address_of(cluster)
        short = {"prompt": [1, 2], "max_tokens": 20, "stream": True}
        ends, end_writer = await send(address, "/v1/completions", json.dumps(short).encode())
        stays, stay_writer = await send(address, "/v1/completions", json.dumps(LONG).encode())
        await asyncio.wait_for(ends.readuntil(b"data: "), 5)
        await asyncio.wait_for(stays.readuntil(b"data: "), 5)
        await cluster.server.drain(1.0)
        assert b"[DONE]" in await asyncio.wait_for(ends.readuntil(b"0\r\n\r\n"), 5)
        rest = await asyncio.wait_for(stays.readuntil(b"0\r\n\r\n"), 5)
        assert b"the router stops" in rest
        assert b"[DONE]" not in rest
        end_writer.close()
        stay_writer.close()
        with pytest.raises(ConnectionError):
            await connect(address)


async def test_small_writes_go_at_once(cluster: Cluster) -> None:
    _, writer = await connect(address_of(cluster))
    server = cluster.server._http
    assert server is not None
    open_ones = server._server.server_state.connections
    await until(lambda: len(open_ones) == 1)
    (protocol,) = open_ones
    accepted = protocol.transport.get_extra_info("socket")
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    writer.close()


async def test_a_taken_http_port_is_an_error_that_names_it(cluster: Cluster) -> None:
    address = address_of(cluster)
    config = cluster.router.config.model_copy(update={"grpc": "127.0.0.1:0", "http": address})
    with pytest.raises(CannotBind, match=address):
        async with RouterServer(Router(config)):
            pass
