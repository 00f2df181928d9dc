"""What is sent to an OpenAI-compatible server, and what is heard of its streams."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from pdserve.bench.errors import BenchError
from pdserve.bench.serve.client import Answer, RequestFailed, Sampling, Served
from pdserve.bench.serve.endpoint import Api, Endpoint
from pdserve.bench.serve.http_client import HttpClient
from pdserve.bench.serve.workload import PlannedRequest, Prompt
from tests.unit.bench.serve.openai_server import (
    DONE,
    USAGE,
    OpenAIServer,
    chunk,
    event,
    openai_server,
    tokens,
)


@pytest.fixture
async def server() -> AsyncIterator[OpenAIServer]:
    async with openai_server() as made:
        yield made


def asked(prompt: Prompt = (1, 2, 3)) -> PlannedRequest:
    return PlannedRequest(0.0, prompt, 3, len(prompt))


async def sent(
    endpoint: Endpoint, request: PlannedRequest | None = None, timeout_s: float | None = 20.0
) -> tuple[Answer, int]:
    """The answer, and how often tokens came."""
    heard: list[None] = []
    async with HttpClient(endpoint, timeout_s=timeout_s) as client:
        answer = await client.send(request or asked(), lambda: heard.append(None))
    return answer, len(heard)


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
async def test_a_completion_is_asked_for_and_counted(server: OpenAIServer, ending: str) -> None:
    answer, num_heard = await sent(Endpoint(server.url + ending, model="made", api_key="secret"))
    assert num_heard == 3
    assert answer == Answer(7, 4, 3)
    assert server.keys == ["Bearer secret"]
    assert server.bodies == [
        {
            "model": "made",
            "prompt": [1, 2, 3],
            "max_tokens": 3,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
    ]


async def test_a_chat_is_asked_for_with_text_only(server: OpenAIServer) -> None:
    server.script = [
        chunk({"delta": {"role": "assistant", "content": ""}, "finish_reason": None}),
        chunk({"delta": {"content": "a"}, "finish_reason": None}),
        chunk({"delta": {"content": ""}, "finish_reason": None}),  # part of a character
        chunk({"delta": {}, "finish_reason": "stop"}),
        DONE,
    ]
    endpoint = Endpoint(server.url, Api.CHAT, "made")
    answer, num_heard = await sent(endpoint, asked("Hello?"))
    assert (answer, num_heard) == (Answer(None, None, None), 2)
    assert server.paths == ["/v1/chat/completions"]
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "Hello?"}]
    with pytest.raises(BenchError, match="a chat takes text"):
        await sent(endpoint)


@pytest.fixture
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


async def test_a_key_goes_to_hosts_that_netrc_has_a_password_for(
    server: OpenAIServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_proxies: None
) -> None:
    (tmp_path / "netrc").write_text("default login somebody password word\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    elsewhere = server.url.replace("127.0.0.1", "0.0.0.0")
    await sent(Endpoint(elsewhere, model="made", api_key="secret"))
    assert server.keys == ["Bearer secret"]


async def test_the_environments_proxy_is_for_other_machines(
    server: OpenAIServer, monkeypatch: pytest.MonkeyPatch, no_proxies: None
) -> None:
    monkeypatch.setenv("http_proxy", server.url)
    await sent(Endpoint("http://elsewhere.invalid", model="made"))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    await sent(Endpoint(server.url, model="made"))
    monkeypatch.setenv("no_proxy", "0.0.0.0")
    await sent(Endpoint(server.url.replace("127.0.0.1", "0.0.0.0"), model="made"))
    assert server.paths == ["/v1/completions"] * 3


async def test_a_model_has_to_be_known(server: OpenAIServer) -> None:
    with pytest.raises(BenchError, match="which model"):
        await sent(Endpoint(server.url))


async def test_what_is_extra_goes_over_the_rest(server: OpenAIServer) -> None:
    extra: dict[str, object] = {"temperature": 0.7, "priority": 1}
    async with HttpClient(Endpoint(server.url, model="m", extra=extra), Sampling(ignore_eos=False)) as client:
        await client.send(asked(), lambda: None)
    (body,) = server.bodies
    assert (body["temperature"], body["priority"]) == (0.7, 1)
    assert "ignore_eos" not in body


async def test_chunks_may_be_cut_and_joined_anywhere(server: OpenAIServer) -> None:
    whole = b"".join([b": hello\r\n\r\n", *tokens("a", "\u00e9", "c"), USAGE, DONE])
    for size in (1, 7, len(whole)):
        server.script = [whole[start : start + size] for start in range(0, len(whole), size)]
        answer, num_heard = await sent(Endpoint(server.url, model="made"))
        assert (num_heard, answer.num_tokens) == (3, 3)


async def test_an_end_without_a_token_is_no_arrival(server: OpenAIServer) -> None:
    closing = {"text": "", "finish_reason": "length"}
    server.script = [*tokens("a", "b")[:1], chunk(closing), DONE]
    assert (await sent(Endpoint(server.url, model="made")))[1] == 1
    server.script = [*tokens("a", "b")[:1], chunk(closing | {"token_ids": [5]}), DONE]
    assert (await sent(Endpoint(server.url, model="made")))[1] == 2


async def test_usage_with_an_empty_choice_is_no_arrival(server: OpenAIServer) -> None:
    server.script = [
        chunk({"index": 0, "delta": {"content": "a"}, "finish_reason": None}),
        chunk({"index": 0, "delta": {}, "finish_reason": "stop"}),
        chunk({"index": 0, "delta": {}}, usage={"prompt_tokens": 7, "completion_tokens": 1}),
        DONE,
    ]
    answer, num_heard = await sent(Endpoint(server.url, Api.CHAT, "made"), asked("Hello?"))
    assert (answer, num_heard) == (Answer(7, None, 1), 1)


async def test_a_second_answer_to_one_request_is_refused(server: OpenAIServer) -> None:
    one, other = ({"index": index, "text": "a", "finish_reason": None} for index in (0, 1))
    server.script = [chunk(one), chunk(other), *tokens("b", "c"), DONE]
    with pytest.raises(RequestFailed, match="several answers") as failure:
        await sent(Endpoint(server.url, model="made", extra={"n": 2}))
    assert failure.value.code == "SEVERAL_ANSWERS"


@pytest.mark.parametrize(
    ("status", "script", "code", "told"),
    [
        (429, event({"error": {"message": "too many"}})[6:], "429", "too many"),
        (400, b'{"error": "bad prompt"}', "400", "bad prompt"),
        (500, b"<html>oops</html>", "500", "oops"),
        (404, b"", "404", "Not Found"),
        (200, event({"error": {"message": "lost a worker", "code": "worker_lost"}}), "worker_lost", "lost"),
        (200, event({"error": {"message": "oops", "code": None}}), "ERROR", "oops"),
        (200, tokens("a", "b")[0], "BROKEN_STREAM", "without a finish_reason"),
        (200, b"data: {]\n\n", "BROKEN_STREAM", "no chunk of OpenAI's API"),
        (200, b"data: []\n\n", "BROKEN_STREAM", "no chunk of OpenAI's API"),
    ],
)
async def test_failures_have_a_code_and_the_servers_words(
    server: OpenAIServer, status: int, script: bytes, code: str, told: str
) -> None:
    server.status, server.script = status, [script]
    with pytest.raises(RequestFailed, match=told) as failure:
        await sent(Endpoint(server.url, model="made"))
    assert failure.value.code == code


async def test_time_limits_and_lost_servers_are_failures(server: OpenAIServer) -> None:
    server.is_endless = True
    with pytest.raises(RequestFailed, match="not done within") as failure:
        await sent(Endpoint(server.url, model="made"), timeout_s=0.2)
    assert failure.value.code == "TIMEOUT"
    with pytest.raises(RequestFailed) as failure:
        await sent(Endpoint("http://127.0.0.1:9", model="made"))
    assert failure.value.code == "CONNECTION"


async def test_an_infinite_time_limit_is_none(server: OpenAIServer) -> None:
    assert (await sent(Endpoint(server.url, model="made"), timeout_s=math.inf))[1] == 3


async def test_a_model_that_is_named_need_not_be_listed_anywhere(server: OpenAIServer) -> None:
    server.status = 404
    async with HttpClient(Endpoint(server.url, model="named")) as client:
        assert await client.served() == Served("named", None, None)
    async with HttpClient(Endpoint(server.url)) as client:
        with pytest.raises(BenchError, match="answers 404"):
            await client.served()


async def test_a_connection_that_is_never_made_is_no_time_limit_of_the_request(
    server: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise aiohttp.ConnectionTimeoutError("Connection timeout to host")

    monkeypatch.setattr(aiohttp.ClientSession, "post", full)
    with pytest.raises(RequestFailed, match="Connection timeout to host") as failure:
        await sent(Endpoint(server.url, model="made"))
    assert failure.value.code == "CONNECTION"


async def test_cancelling_closes_the_connection(server: OpenAIServer) -> None:
    server.is_endless = True
    sending = asyncio.create_task(sent(Endpoint(server.url, model="made")))
    await asyncio.wait_for(server.written.wait(), 10)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    await asyncio.wait_for(server.closed.wait(), 10)


async def test_the_model_is_the_first_one_listed_or_the_one_named(server: OpenAIServer) -> None:
    async with HttpClient(Endpoint(server.url)) as client:
        assert await client.served() == Served("made", 100, None)
        await client.send(asked(), lambda: None)
    assert server.bodies[0]["model"] == "made"
    async with HttpClient(Endpoint(server.url, model="an-adapter")) as client:
        assert await client.served() == Served("an-adapter", None, None)


@pytest.mark.parametrize(
    ("status", "models", "told"),
    [
        (200, {"data": []}, "lists no model"),
        (200, {"models": []}, "does not answer with a list of models"),
        (200, ["made"], "does not answer with a list of models"),
        (401, {"error": {"message": "no key"}}, "answers 401: no key"),
    ],
)
async def test_a_server_without_models_is_told(
    server: OpenAIServer, status: int, models: object, told: str
) -> None:
    server.status, server.models = status, models
    async with HttpClient(Endpoint(server.url)) as client:
        with pytest.raises(BenchError, match=told):
            await client.served()


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://[::1"])
async def test_nobody_at_the_address_is_told(url: str) -> None:
    async with HttpClient(Endpoint(url)) as client:
        with pytest.raises(BenchError, match="no server answers at http://"):
            await client.served()
