"""A request's trace, as a collector gets it from a router and its workers, over real gRPC and real OTLP."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
import torch

from engine.config import ModelConfig
from engine.loading import LoadedModel, load_model
from kv_transfer.transport.memory import Faults
from observability.config import ObservabilityConfig
from pdserve.client import Delta, InvalidArgument
from router.events import Moment
from tests.collector import Collector, SeenSpan, over_grpc, over_http
from tests.integration.http.raw import post
from tests.integration.router.harness import until
from tests.models import tiny_model
from tests.serving import serving
from tests.unit.engine.driving import prompt
from worker.identity import Role

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=7"}
PHASES = ["queue", "reserve", "prefill", "transfer", "decode"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(ModelConfig(id=str(folder), device="cpu"))


@pytest.fixture
def collector() -> Collector:
    return Collector()


@pytest.fixture
def traced(collector: Collector) -> Iterator[ObservabilityConfig]:
    with over_grpc(collector) as endpoint:
        yield to(endpoint)


def to(endpoint: str, **settings: object) -> ObservabilityConfig:
    return ObservabilityConfig.model_validate({"traces": {"endpoint": endpoint} | settings})


def check_one_of_each_phase(collector: Collector, request_id: str) -> SeenSpan:
    """In one trace, under one `generate`, which is returned."""
    (whole,) = collector.named("generate")
    assert Counter(span.name for span in collector.spans) == Counter(["generate", *PHASES])
    for span in collector.spans:
        assert span.error is None
        assert span.trace_id == whole.trace_id
        assert span is whole or span.parent == whole.span_id
        assert whole.begin_ns <= span.begin_ns <= span.end_ns <= whole.end_ns + 1e9
    queue, reserve, prefill, transfer, decode = (collector.named(name)[0] for name in PHASES)
    assert queue.end_ns <= reserve.begin_ns <= reserve.end_ns <= prefill.begin_ns
    assert transfer.end_ns > prefill.begin_ns
    assert decode.end_ns > decode.begin_ns >= prefill.begin_ns
    services = [span.service for span in (whole, queue, reserve, prefill, transfer, decode)]
    router, p, d = "pdserve-router", "pdserve-prefill", "pdserve-decode"
    assert services == [router, router, router, p, p, d]
    assert {span.attributes.get("pdserve.request_id") for span in (whole, prefill, transfer, decode)} == {
        request_id
    }
    assert len({span.of("transfer_id") for span in (queue, reserve, prefill, transfer, decode)}) == 1
    return whole


@pytest.mark.parametrize("protocol", ["grpc", "http"])
async def test_a_clients_trace_goes_through_every_phase_on_every_worker(
    protocol: str, folder: Path, loaded: LoadedModel, collector: Collector
) -> None:
    listening = over_grpc if protocol == "grpc" else over_http
    with listening(collector) as endpoint:
        async with serving(folder, loaded, observability=to(endpoint, protocol=protocol)) as cluster:
            answer = await cluster.client.generate(
                prompt(100), max_tokens=9, ignore_eos=True, request_id="odd \u00e9", metadata=SAMPLED
            )
    whole = check_one_of_each_phase(collector, "odd \u00e9")
    assert (whole.trace_id, whole.parent, whole.state) == (TRACE, SPAN, "vendor=7")
    _, reserve, prefill, transfer, decode = (collector.named(name)[0] for name in PHASES)
    assert whole.attributes["gen_ai.usage.input_tokens"] == 100
    assert whole.attributes["gen_ai.usage.output_tokens"] == 9
    assert whole.attributes["gen_ai.response.finish_reasons"] == ["FINISH_REASON_LENGTH"]
    assert (whole.of("prefill_worker"), whole.of("decode_worker")) == ("prefill-0", "decode-1")
    assert (prefill.of("worker"), prefill.of("num_tokens"), prefill.of("cached_tokens")) == (
        "prefill-0",
        100,
        0,
    )
    assert (transfer.of("worker"), transfer.of("transfer_bytes")) == (
        "prefill-0",
        answer.timings.transfer_bytes,
    )
    assert answer.timings.transfer_bytes > 0
    assert (reserve.of("worker"), decode.of("worker")) == ("decode-1", "decode-1")
    assert (decode.of("num_tokens"), decode.of("outcome")) == (8, "LENGTH")  # all but the first
    assert decode.of("decode_start_ms") > 0
    assert {name for name, _ in whole.events} == {moment.value for moment in Moment}
    assert dict(whole.events)["TRANSFER_END"]["pdserve.worker"] == "prefill-0"


async def test_http_headers_are_a_clients_trace_too(
    folder: Path, loaded: LoadedModel, collector: Collector, traced: ObservabilityConfig
) -> None:
    body = json.dumps({"prompt": prompt(40), "max_tokens": 4, "ignore_eos": True}).encode()
    async with serving(folder, loaded, observability=traced, router={"http": "127.0.0.1:0"}) as cluster:
        address = cluster.server.http_address
        assert address is not None
        answer = await post(address, "/v1/completions", body, SAMPLED | {"x-request-id": "mine"})
        assert answer.status == 200
    whole = check_one_of_each_phase(collector, "mine")
    assert (whole.trace_id, whole.parent, whole.state) == (TRACE, SPAN, "vendor=7")


async def test_without_a_clients_trace_each_request_is_one_of_its_own(
    folder: Path, loaded: LoadedModel, collector: Collector, traced: ObservabilityConfig
) -> None:
    async with serving(folder, loaded, observability=traced) as cluster:
        for malformed in ({}, {"traceparent": "00-nonsense"}):
            await cluster.client.generate(prompt(20), max_tokens=3, metadata=malformed)
    wholes = collector.named("generate")
    assert [span.parent for span in wholes] == ["", ""]
    assert len({span.trace_id for span in wholes}) == 2


async def test_a_client_that_does_not_sample_is_not_traced(
    folder: Path, loaded: LoadedModel, collector: Collector, traced: ObservabilityConfig
) -> None:
    async with serving(folder, loaded, observability=traced) as cluster:
        metadata = {"traceparent": f"00-{TRACE}-{SPAN}-00"}
        await cluster.client.generate(prompt(20), max_tokens=3, metadata=metadata)
    assert collector.spans == []


async def test_a_sample_ratio_of_none_leaves_only_what_clients_chose(
    folder: Path, loaded: LoadedModel, collector: Collector
) -> None:
    with over_grpc(collector) as endpoint:
        async with serving(folder, loaded, observability=to(endpoint, sample_ratio=0)) as cluster:
            await cluster.client.generate(prompt(20), max_tokens=3)
            await cluster.client.generate(prompt(20), max_tokens=3, metadata=SAMPLED)
    assert {span.trace_id for span in collector.spans} == {TRACE}


async def test_several_prompts_and_several_answers_are_one_trace(
    folder: Path, loaded: LoadedModel, collector: Collector, traced: ObservabilityConfig
) -> None:
    fields = {"prompt": [prompt(20), prompt(30)], "n": 2, "max_tokens": 4, "ignore_eos": True}
    async with serving(folder, loaded, observability=traced, router={"http": "127.0.0.1:0"}) as cluster:
        address = cluster.server.http_address
        assert address is not None
        answer = await post(address, "/v1/completions", json.dumps(fields).encode())
        assert answer.status == 200
    (around,) = collector.named("generate_all")
    wholes = collector.named("generate")
    assert [span.parent for span in wholes] == [around.span_id] * 2
    assert {span.trace_id for span in collector.spans} == {around.trace_id}
    assert [span.attributes["gen_ai.usage.output_tokens"] for span in wholes] == [8, 8]
    for name in ("queue", "reserve", "prefill", "decode"):
        assert Counter(span.parent for span in collector.named(name)) == {span.span_id: 2 for span in wholes}


async def test_a_colocated_worker_makes_both_phases(
    folder: Path, loaded: LoadedModel, collector: Collector, traced: ObservabilityConfig
) -> None:
    async with serving(folder, loaded, (Role.COLOCATED,), observability=traced) as cluster:
        await cluster.client.generate(prompt(60), max_tokens=5, ignore_eos=True)
    counts = Counter(span.name for span in collector.spans)
    assert counts == Counter(["generate", "queue", "reserve", "prefill", "decode"])
    (prefill,), (decode,) = collector.named("prefill"), collector.named("decode")
    assert prefill.service == decode.service == "pdserve-colocated"
    assert prefill.end_ns <= decode.begin_ns + 1e9
    assert (prefill.of("cached_tokens"), decode.of("num_tokens")) == (0, 5)


async def test_a_first_token_that_ends_the_answer_ships_and_decodes_nothing(
    folder: Path, loaded: LoadedModel, collector: Collector, traced: ObservabilityConfig
) -> None:
    async with serving(folder, loaded, observability=traced) as cluster:
        await cluster.client.generate(prompt(60), max_tokens=1)
    assert Counter(span.name for span in collector.spans) == Counter(
        ["generate", "queue", "reserve", "prefill"]
    )
    assert [span.error for span in collector.spans] == [None] * 4


async def test_a_hand_over_that_breaks_is_an_error_and_its_second_try_has_another_epoch(
    folder: Path, loaded: LoadedModel, collector: Collector, traced: ObservabilityConfig
) -> None:
    async with serving(folder, loaded, transport="memory", observability=traced) as cluster:
        cluster.memory.faults = Faults(kill_at=1)
        asking = asyncio.ensure_future(cluster.client.generate(prompt(40), max_tokens=6, ignore_eos=True))
        await until(lambda: bool(cluster.router._dispatcher.num_resumes), 30)
        cluster.memory.faults = Faults()
        answer = await asyncio.wait_for(asking, 30)
        assert answer.completions[0].num_resumes >= 1
    (whole,) = collector.named("generate")
    assert whole.error is None
    assert whole.of("num_resumes") == answer.completions[0].num_resumes
    broken = [span for span in collector.spans if span.error is not None]
    assert broken
    assert {span.name for span in broken} <= {"prefill", "transfer"}
    last = max(span.of("epoch") for span in collector.named("prefill"))
    assert [span.of("epoch") for span in collector.named("decode")] == [last]
    assert last > 1


async def test_what_fails_says_so_without_the_words_of_its_message(
    folder: Path, loaded: LoadedModel, collector: Collector, traced: ObservabilityConfig
) -> None:
    async with serving(folder, loaded, observability=traced) as cluster:
        with pytest.raises(InvalidArgument):
            await cluster.client.generate(prompt(20), max_tokens=10_000, metadata=SAMPLED)
    (whole,) = collector.spans
    assert (whole.name, whole.trace_id) == ("generate", TRACE)
    assert whole.error == "INVALID_ARGUMENT CONTEXT_LENGTH_EXCEEDED"


async def test_a_client_that_leaves_ends_its_spans(
    folder: Path, loaded: LoadedModel, collector: Collector, traced: ObservabilityConfig
) -> None:
    async with serving(folder, loaded, observability=traced, num_blocks=128) as cluster:
        stream = cluster.client.generate_stream(prompt(20), max_tokens=1500, ignore_eos=True, timeout=60)
        async with aclosing(stream):
            num_deltas = 0
            async for event in stream:
                num_deltas += isinstance(event, Delta)
                if num_deltas == 3:
                    break
    (whole,), (decode,) = collector.named("generate"), collector.named("decode")
    assert whole.error == "CANCELLED"
    assert (decode.error, decode.of("outcome")) == (None, "BY_ROUTER")
    assert decode.of("num_tokens") >= 1


async def test_a_collector_that_is_gone_harms_no_request_and_holds_up_no_end(
    folder: Path, loaded: LoadedModel
) -> None:
    with over_grpc(Collector()) as endpoint:
        pass
    async with serving(folder, loaded, observability=to(endpoint)) as cluster:
        answer = await cluster.client.generate(prompt(20), max_tokens=3, ignore_eos=True)
        assert len(answer.token_ids) == 3
        began_at = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - began_at < 40
