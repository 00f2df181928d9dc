"""/metrics of a router on scripted workers: what clients felt, what failed, who does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from pdserve.v1 import worker_pb2, worker_pb2_grpc
from pdserve.v1.errors import DeadlineExceeded, InvalidArgument, NotFound, ResourceExhausted, Unavailable
from router.http.openai_api import TIMEOUT_HEADER
from router.metrics import scrape as scraping
from tests.integration.http.raw import Answer, get, post
from tests.integration.http.scraped import scrape
from tests.integration.router.harness import Cluster, running, until

PHASE = "pdserve_time_to_first_token_phase_seconds"


@pytest_asyncio.fixture
async def cluster(model_dir: Path) -> AsyncIterator[Cluster]:
    async with running(model_dir, http="127.0.0.1:0", max_queued_requests=2) as cluster:
        yield cluster


async def test_a_request_is_measured_where_its_client_stands(cluster: Cluster) -> None:
    cluster.d.step_s = 0.02
    cluster.p.hold_token.clear()
    asked = asyncio.ensure_future(cluster.client.generate([1, 2, 3, 4, 5], max_tokens=10, seed=7))
    await until(lambda: cluster.p.num_prefills == 1)
    await asyncio.sleep(0.01)  # the worker says that it was in its queue for a millisecond
    cluster.p.hold_token.set()
    answer = await asked
    seen = await scrape(cluster.server.http_address)
    for name in (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_time_per_output_token_seconds",
        "request_kv_transfer_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
    ):
        assert seen.value(f"pdserve_{name}_count") == 1
    assert seen.value("pdserve_prompt_tokens_total") == 5
    assert seen.value("pdserve_prefix_cache_queries_total") == 5
    assert seen.value("pdserve_prefix_cache_hits_total") == 4
    assert seen.value("pdserve_generation_tokens_total") == 10
    assert 1 <= seen.value("pdserve_inter_token_latency_seconds_count") <= 9
    gaps = seen.value("pdserve_inter_token_latency_seconds_sum")
    first = seen.value("pdserve_time_to_first_token_seconds_sum")
    assert gaps > 4 * 0.02
    assert first + gaps <= seen.value("pdserve_e2e_request_latency_seconds_sum")
    phases = {name: seen.value(f"{PHASE}_sum", phase=name) for name in ("queue", "reserve", "prefill")}
    assert sum(phases.values()) == pytest.approx(answer.timings.ttft_ms / 1000)
    assert first >= answer.timings.ttft_ms / 1000
    assert phases["reserve"] > 0
    assert seen.value("pdserve_request_success_total", finished_reason="length") == 1
    assert seen.value("pdserve_request_success_total") == 1
    assert seen.value("pdserve_request_failures_total") == 0


async def test_http_and_grpc_are_counted_alike_and_n_by_sequences(cluster: Cluster) -> None:
    await cluster.client.generate([1, 2], max_tokens=3)
    body = b'{"prompt": [[1, 2], [3]], "max_tokens": 3, "n": 2}'
    assert (await post(str(cluster.server.http_address), "/v1/completions", body)).status == 200
    seen = await scrape(cluster.server.http_address)
    assert seen.value("pdserve_request_success_total") == 5
    assert seen.value("pdserve_time_to_first_token_seconds_count") == 5
    assert seen.value("pdserve_generation_tokens_total") == 15
    assert seen.value("pdserve_request_failures_total") == 0


async def post_within(cluster: Cluster, seconds: str) -> Answer:
    """The limit is the router's alone: over gRPC the client's clock would run too."""
    headers = {TIMEOUT_HEADER: seconds}
    return await post(str(cluster.server.http_address), "/v1/completions", b'{"prompt": [1]}', headers)


async def test_every_failure_has_its_code(cluster: Cluster) -> None:
    client = cluster.client
    with pytest.raises(InvalidArgument):
        await client.generate([1], max_tokens=100_000)
    with pytest.raises(NotFound):
        await client.generate([1], model="another")
    cluster.p.fail_always = Unavailable("gone")
    with pytest.raises(Unavailable):
        await client.generate([1])
    cluster.p.fail_always = None
    cluster.p.hold_token.clear()
    assert (await post_within(cluster, "0.2")).status == 408
    await until(cluster.is_idle)
    asked = asyncio.ensure_future(client.generate([1]))
    await until(lambda: bool(cluster.d.reserved))
    asked.cancel()
    await asyncio.wait({asked}, timeout=10)
    cluster.p.hold_token.set()
    await until(cluster.is_idle)
    cluster.d.reserve_error = ResourceExhausted("no blocks")
    # Long enough for a busy machine to be refused once.
    assert (await post_within(cluster, "2")).status == 429
    seen = await scrape(cluster.server.http_address)
    failed = {
        sample.labels["code"]: sample.value
        for sample in seen.families["pdserve_request_failures"].samples
        if sample.value
    }
    assert failed == dict.fromkeys(
        (
            "INVALID_ARGUMENT",
            "NOT_FOUND",
            "UNAVAILABLE",
            "DEADLINE_EXCEEDED",
            "CANCELLED",
            "RESOURCE_EXHAUSTED",
        ),
        1,
    )
    assert (
        seen.value("pdserve_request_resumes_total") == 3
    )  # the retries of the one that was told UNAVAILABLE
    assert seen.value("pdserve_reservations_refused_total") > 0
    assert seen.value("pdserve_time_to_first_token_seconds_count") == 0


async def test_a_time_limit_that_a_client_keeps_by_its_own_clock_is_no_cancel(model_dir: Path) -> None:
    """gRPC tells the router of more time than there is: of 1.041 s as of 1.05 s."""
    limits = [1.021 + 0.0025 * index for index in range(8)]
    outcomes: list[str | None] = []
    async with running(model_dir, http="127.0.0.1:0") as cluster:
        cluster.p.hold_token.clear()
        cluster.router.on_event(lambda event: outcomes.append(event.outcome))
        asked = [cluster.client.generate([1, 2, 3], timeout=limit) for limit in limits]
        errors = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(error) for error in errors} == {DeadlineExceeded}
        await until(cluster.is_idle)
        cluster.p.hold_token.set()
        seen = await scrape(cluster.server.http_address)
    assert seen.value("pdserve_request_failures_total", code="DEADLINE_EXCEEDED") == len(limits)
    assert seen.value("pdserve_request_failures_total") == len(limits)
    assert {outcome for outcome in outcomes if outcome is not None} == {"DEADLINE_EXCEEDED"}


async def test_the_queue_and_what_has_left_it_are_told(model_dir: Path) -> None:
    async with running(model_dir, http="127.0.0.1:0", prefill_backlog_tokens=100) as cluster:
        cluster.p.hold_token.clear()
        asked = [asyncio.ensure_future(cluster.client.generate([1] * 40, max_tokens=2)) for _ in range(6)]
        await until(lambda: cluster.p.num_prefills == 2)  # more than that is not sent to it at once
        seen = await scrape(cluster.server.http_address)
        while seen.value("pdserve_num_requests_waiting") < 4:
            seen = await scrape(cluster.server.http_address)
        assert seen.value("pdserve_num_requests_running") == 2
        cluster.p.hold_token.set()
        await asyncio.gather(*asked)
        seen = await scrape(cluster.server.http_address)
        assert seen.value("pdserve_num_requests_running") == seen.value("pdserve_num_requests_waiting") == 0


async def test_the_pools_are_told_with_every_state(cluster: Cluster) -> None:
    seen = await scrape(cluster.server.http_address)
    assert seen.value("pdserve_serving") == 1
    assert seen.value("pdserve_pool_workers", pool="decode", state="ready") == 1
    assert seen.value("pdserve_pool_workers", pool="decode") == 1
    assert seen.value("pdserve_pool_target_workers", pool="prefill") == 1
    await cluster.d.stop()
    pools = cluster.pools()
    pools[1].workers[0].state = 6  # dead
    await cluster.control.show(pools)
    await until(lambda: len(cluster.router.table.all()) == 1)
    seen = await scrape(cluster.server.http_address)
    assert seen.value("pdserve_serving") == 0
    assert seen.value("pdserve_pool_workers", pool="decode") == 0
    assert seen.value("pdserve_pool_target_workers", pool="decode") == 1


class Silent(worker_pb2_grpc.WorkerServicer):
    async def Metrics(
        self, request: worker_pb2.MetricsRequest, context: object
    ) -> worker_pb2.MetricsResponse:
        await asyncio.Event().wait()
        raise AssertionError


class Odd(worker_pb2_grpc.WorkerServicer):
    """Tells what it should not: another's labels, garbage, a family of the router's."""

    async def Metrics(
        self, request: worker_pb2.MetricsRequest, context: object
    ) -> worker_pb2.MetricsResponse:
        text = b"# TYPE pdserve_serving counter\npdserve_serving 7\n\xff\n# TYPE odd gauge\nodd 1\n"
        return worker_pb2.MetricsResponse(exposition=text)


async def test_a_worker_that_does_not_answer_costs_nobody_elses_metrics(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scraping, "TIMEOUT_S", 3.0)
    async with running(model_dir, num_decodes=3, http="127.0.0.1:0") as cluster:
        for decode, servicer in zip(cluster.decodes, (Silent(), Odd()), strict=False):
            await decode.stop()
            services = decode.services
            decode.services = lambda server, also=servicer, services=services: (  # type: ignore[method-assign]
                services(server),
                worker_pb2_grpc.add_WorkerServicer_to_server(also, server),
            )
            await decode.start()
        await cluster.ready()
        seen = await scrape(cluster.server.http_address)
        up = {sample.labels["worker"]: sample.value for sample in seen.families["pdserve_worker_up"].samples}
        # The others have no such RPC at all.
        assert up == {"prefill-0": 0, "decode-0": 0, "decode-1": 1, "decode-2": 0}
        assert seen.value("pdserve_serving") == 1
        assert seen.value("odd", role="decode", worker="decode-1", model_name="tiny") == 1


async def test_every_sample_says_its_role_worker_and_model(cluster: Cluster) -> None:
    seen = await scrape(cluster.server.http_address)
    assert all(sample.labels["model_name"] == "tiny" for sample in seen.samples)
    assert {(sample.labels["role"], sample.labels["worker"]) for sample in seen.samples} == {
        ("router", "router-0"),
        ("prefill", "prefill-0"),
        ("decode", "decode-0"),
    }


async def test_other_methods_are_refused(cluster: Cluster) -> None:
    address = str(cluster.server.http_address)
    assert (await post(address, "/metrics", b"{}")).status == 405
    assert (await get(address, "/metrics/")).status in (307, 404)
