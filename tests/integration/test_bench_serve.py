"""The load test against a real 1P1D in one process, over gRPC and over HTTP."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from engine.config import ModelConfig
from engine.loading import LoadedModel, load_model
from pdserve.bench.serve.client import ServeClient
from pdserve.bench.serve.endpoint import Api, Endpoint
from pdserve.bench.serve.goodput import Slo, goodput
from pdserve.bench.serve.grpc_client import GrpcClient
from pdserve.bench.serve.http_client import HttpClient
from pdserve.bench.serve.prompts import in_words
from pdserve.bench.serve.run import run
from pdserve.bench.serve.summary import summarize
from pdserve.bench.serve.trace import Trace, TraceRow
from pdserve.bench.serve.workload import PlannedRequest, Workload
from pdserve.bench.serve.workloads import random_workload, trace_workload
from tests.integration.router.harness import until
from tests.models import MAX_LEN, VOCAB_SIZE, tiny_model
from tests.serving import Serving, serving
from worker.identity import Role

WAYS = ["grpc", "http"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(ModelConfig(id=str(folder), device="cpu"))


@pytest.fixture
async def cluster(folder: Path, loaded: LoadedModel) -> AsyncIterator[Serving]:
    async with serving(folder, loaded, num_blocks=256, router={"http": "127.0.0.1:0"}) as made:
        yield made


@asynccontextmanager
async def client_of(cluster: Serving, way: str, api: Api = Api.COMPLETIONS) -> AsyncIterator[ServeClient]:
    if way == "grpc":
        async with GrpcClient(cluster.server.address, timeout_s=60) as client:
            yield client
    else:
        endpoint = Endpoint(f"http://{cluster.server.http_address}", api)
        async with HttpClient(endpoint, timeout_s=60) as client:
            yield client


@pytest.mark.parametrize("way", WAYS)
async def test_every_request_has_its_tokens_and_its_times(cluster: Serving, way: str) -> None:
    workload = random_workload(12, 40, 9, range_ratio=0.5, vocab_size=VOCAB_SIZE).at_rate(60)
    async with client_of(cluster, way) as client:
        served = await client.served()
        records = await run(workload, client)
    assert (served.model, served.max_model_len, served.vocab_size) == ("tiny", MAX_LEN, VOCAB_SIZE)
    for request, record in zip(workload.requests, records, strict=True):
        assert record.is_ok, record.failure
        # Where the router is busy, tokens that wait go out together.
        assert record.num_tokens == request.max_tokens >= len(record.arrivals_s) > 0
        assert record.num_prompt_tokens == request.num_prompt_tokens
        assert record.scheduled_s <= record.sent_s <= record.arrivals_s[0]
        assert all(earlier <= later for earlier, later in itertools.pairwise(record.arrivals_s))
        assert record.arrivals_s[-1] <= record.ended_s
        assert (record.timings is not None) == (way == "grpc")
    summary = summarize(records)
    assert (summary.num_ok, summary.num_failed) == (12, 0)
    assert summary.num_tokens == sum(request.max_tokens for request in workload.requests)
    assert goodput(records, Slo(ttft_ms=60_000, tpot_ms=60_000)).attainment == 1.0
    assert goodput(records, Slo(ttft_ms=1e-6)).attainment == 0.0


@pytest.mark.parametrize("way", WAYS)
async def test_equal_blocks_of_a_trace_hit_the_prefix_cache(cluster: Serving, way: str) -> None:
    rows = [TraceRow(float(at_s), 2000, 3, (1, 2, 3, 4 + at_s)) for at_s in range(4)]
    trace = trace_workload(Trace("made", tuple(rows)), block_tokens=16, vocab_size=VOCAB_SIZE)
    async with client_of(cluster, way) as client:
        await client.served()
        # One after the other, so that each finds what the one before has left.
        records = [(await run(Workload("one", (each,)).at_rate(1), client))[0] for each in trace.requests]
    assert [record.num_prompt_tokens for record in records] == [64] * 4
    assert [record.num_cached_tokens for record in records] == [0, 48, 48, 48]


async def test_a_chat_is_loaded_with_text(cluster: Serving) -> None:
    workload = in_words(random_workload(4, 10, 6, vocab_size=VOCAB_SIZE)).at_rate(100)
    async with client_of(cluster, "http", Api.CHAT) as client:
        await client.served()
        records = await run(workload, client)
    assert all(record.is_ok and record.num_tokens == 6 for record in records)
    assert all(record.num_prompt_tokens > 10 for record in records)


@pytest.mark.parametrize(("way", "code"), [("grpc", "INVALID_ARGUMENT"), ("http", "400")])
async def test_a_refused_request_is_a_failure_with_its_code(cluster: Serving, way: str, code: str) -> None:
    fits = PlannedRequest(0.0, (5, 6, 7), 4, 3)
    too_long = PlannedRequest(0.0, (5, 6, 7), MAX_LEN, 3)
    async with client_of(cluster, way) as client:
        await client.served()
        good, bad = await run(Workload("made", (fits, too_long)), client)
    assert good.is_ok
    assert bad.failure is not None
    assert bad.failure.code == code
    assert str(MAX_LEN) in bad.failure.message


async def command(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pdserve.cli.main", "bench", "serve", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


@pytest.mark.parametrize("way", WAYS)
async def test_the_command_reports_as_json_and_plots(cluster: Serving, way: str, tmp_path: Path) -> None:
    where = (
        ("--address", cluster.server.address)
        if way == "grpc"
        else ("--url", f"http://{cluster.server.http_address}")
    )
    plot, whole = tmp_path / "plot.png", tmp_path / "whole.json"
    process = await command(
        *where,
        *("--workload", "prefix", "--prefix-tokens", "32", "--input-tokens", "8", "--output-tokens", "4"),
        *("--requests", "6", "--goodput", "ttft:60000", "tpot:60000", "--find-goodput", "--rates", "40,80"),
        *("--json", "--plot", str(plot), "--output", str(whole)),
    )
    told, errors = await asyncio.wait_for(process.communicate(), 90)
    assert process.returncode == 0, errors.decode()
    report = json.loads(told)
    assert [run["workload"]["rate"] for run in report["runs"]] == pytest.approx([40, 80])
    assert all((run["num_ok"], run["attainment"]) == (6, 1.0) for run in report["runs"])
    assert (report["goodput"]["rate"], report["goodput"]["is_above"]) == (None, True)
    assert plot.stat().st_size > 0
    assert len(json.loads(whole.read_text())["runs"][1]["requests"]) == 6


async def interrupted(*arguments: str, when: Callable[[], bool]) -> str:
    """What the command tells where Ctrl-C comes at that moment."""
    process = await command(*arguments)
    try:
        await until(when, 60)
        process.send_signal(signal.SIGINT)
        told, errors = await asyncio.wait_for(process.communicate(), 30)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 130
    assert "interrupted" in errors.decode()
    return told.decode()


async def test_ctrl_c_cancels_what_is_out(cluster: Serving) -> None:
    await interrupted(
        *("--address", cluster.server.address, "--rate", "inf", "--requests", "4"),
        *("--input-tokens", "8", "--output-tokens", "1500"),
        when=lambda: sum(worker.describe().load.num_running for worker in cluster.workers) >= 4,
    )


async def test_ctrl_c_keeps_what_has_ended(cluster: Serving, tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    (decode,) = cluster.of(Role.DECODE)
    before = decode.describe().counters.tokens_decoded
    told = await interrupted(
        *("--address", cluster.server.address, "--rate", "20", "--requests", "2000"),
        *("--input-tokens", "8", "--output-tokens", "4", "--output", str(kept)),
        when=lambda: decode.describe().counters.tokens_decoded >= before + 40,
    )
    assert "TTFT" in told
    (run,) = json.loads(kept.read_text())["runs"]
    assert 0 < run["num_ok"] == len(run["requests"]) < 2000
