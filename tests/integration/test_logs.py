"""What router and workers log of a request: its ids on every line, and none of its words at any level."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
import torch

from engine.config import ModelConfig
from engine.loading import LoadedModel, load_model
from observability.config import LogFormat, LogLevel, ObservabilityConfig
from observability.logs import log_by
from pdserve.client import InvalidArgument, PdserveError
from tests.collector import Collector, over_grpc
from tests.integration.http.raw import post
from tests.models import tiny_model
from tests.serving import Serving, serving
from worker.identity import Role

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACED = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
# One that stands in no other text.
MARKER = "xylophone-quagmire-zephyr"
MOMENTS = {
    "router.events": {
        *("RECEIVED", "QUEUED", "RESERVED", "PREFILL_BEGIN", "PREFILL_END", "FIRST_TOKEN"),
        *("TRANSFER_END", "DECODE_BEGIN", "FINISHED"),
    },
    "prefill-0": {"PREFILL_BEGIN", "PREFILL_END", "TRANSFER_END"},
    "decode-1": {"RESERVED", "DECODE_BEGIN", "FINISHED"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(ModelConfig(id=str(folder), device="cpu"))


@pytest.fixture
def written(request: pytest.FixtureRequest) -> Iterator[io.StringIO]:
    """All that this process logs, in the test's own format, down to the last level."""
    format: LogFormat = request.param
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    stream = io.StringIO()
    log_by(logging.StreamHandler(stream), ObservabilityConfig(log_format=format, log_level=LogLevel.DEBUG))
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize("written", [LogFormat.JSON], indirect=True)
async def test_every_moment_on_router_and_workers_has_the_same_ids(
    written: io.StringIO, folder: Path, loaded: LoadedModel
) -> None:
    """The trace's too, which a client sends and nobody here traces."""
    async with serving(folder, loaded) as cluster:
        await cluster.client.generate(
            "a few words", max_tokens=5, ignore_eos=True, request_id="odd \u00e9\n", metadata=TRACED
        )
    lines = [json.loads(line) for line in written.getvalue().splitlines()]
    told = [line for line in lines if "transfer_id" in line]
    for line in told:
        assert line["request_id"] == "odd \u00e9\n"
        assert line["trace_id"] == TRACE
    assert len({line["transfer_id"] for line in told}) == 1
    by_teller: dict[str, set[str]] = {}
    for line in told:
        teller = line["logger"] if line["logger"] == "router.events" else line["worker"]
        by_teller.setdefault(teller, set()).add(line["message"])
    assert by_teller == MOMENTS
    (shipped,) = [line for line in told if "transfer_bytes" in line]
    assert shipped["transfer_bytes"] > 0
    (ended,) = [line for line in told if line["message"] == "FINISHED" and line["logger"] != "router.events"]
    assert (ended["worker"], ended["num_tokens"], ended["outcome"]) == ("decode-1", 4, "LENGTH")


@pytest.mark.parametrize("written", [LogFormat.TEXT], indirect=True)
async def test_a_line_of_text_has_them_too(written: io.StringIO, folder: Path, loaded: LoadedModel) -> None:
    async with serving(folder, loaded) as cluster:
        await cluster.client.generate("a few words", max_tokens=5, request_id="mine", metadata=TRACED)
    for moment, worker in (("QUEUED", ""), ("PREFILL_END", "prefill-0"), ("DECODE_BEGIN", "decode-1")):
        ids = rf"{moment} request_id=mine transfer_id=\w+( epoch=1)?( worker={worker})?.* trace_id={TRACE}"
        assert re.search(ids, written.getvalue()), moment


@pytest.mark.parametrize("written", list(LogFormat), indirect=True)
@pytest.mark.parametrize("roles", [(Role.PREFILL, Role.DECODE), (Role.COLOCATED,)])
async def test_prompts_and_answers_are_in_no_line_and_no_span(
    roles: tuple[Role, ...], written: io.StringIO, folder: Path, loaded: LoadedModel
) -> None:
    collector = Collector()
    with over_grpc(collector) as endpoint:
        observability = ObservabilityConfig.model_validate({"traces": {"endpoint": endpoint}})
        http: dict[str, object] = {"http": "127.0.0.1:0", "max_prompt_bytes": 4096}
        async with serving(folder, loaded, roles, router=http, observability=observability) as cluster:
            answers = [*await answered(cluster), *await over_http(cluster)]
            await refused(cluster)
            await left(cluster)
    logged, traced = written.getvalue(), b"".join(collector.raw)
    assert logged.count("FINISHED") >= 4
    assert collector.named("generate")
    for secret in (MARKER, *answers):
        assert len(secret) >= 8
        assert secret not in logged
        assert json.dumps(secret)[1:-1] not in logged
        assert secret.encode() not in traced


async def answered(cluster: Serving) -> list[str]:
    """What must not be found: texts, and the token ids of prompts and answers as anybody would print them."""
    text = await cluster.client.generate(MARKER, max_tokens=24, temperature=0, ignore_eos=True)
    chat = await cluster.client.generate(
        [{"role": "user", "content": MARKER}], max_tokens=24, seed=3, ignore_eos=True, logprobs=2
    )
    ids = [300, 301, 302, 303, 304, 305, 306, 307]
    by_ids = await cluster.client.generate(ids, max_tokens=24, seed=4, ignore_eos=True)
    texts = [answer.text for answer in (text, chat, by_ids)]
    return texts + [str(list(each))[1:-1] for each in (ids, text.token_ids, chat.token_ids)]


async def over_http(cluster: Serving) -> list[str]:
    address = cluster.server.http_address
    assert address is not None
    body = {"prompt": [MARKER, MARKER + "!"], "max_tokens": 24, "ignore_eos": True, "seed": 5}
    answer = await post(address, "/v1/completions", json.dumps(body).encode())
    assert answer.status == 200
    broken = await post(address, "/v1/completions", b'{"prompt": "' + MARKER.encode())
    assert broken.status == 400
    mistyped = await post(address, "/v1/completions", json.dumps({"prompt": {"a": MARKER}}).encode())
    assert mistyped.status == 400
    return [choice["text"] for choice in answer.json["choices"]]


async def refused(cluster: Serving) -> None:
    with pytest.raises(InvalidArgument):
        await cluster.client.generate(MARKER * 1000, max_tokens=4)
    with pytest.raises(InvalidArgument):
        await cluster.client.generate(MARKER, max_tokens=1_000_000)


async def left(cluster: Serving) -> None:
    """By closing, and by a time limit."""
    async with aclosing(cluster.client.generate_stream(MARKER, max_tokens=500, ignore_eos=True)) as stream:
        async for _ in stream:
            break
    with pytest.raises(PdserveError):
        await cluster.client.generate(MARKER, max_tokens=900, ignore_eos=True, timeout=0.05)
