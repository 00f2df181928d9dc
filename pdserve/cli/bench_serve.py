"""`pdserve bench serve`."""

from __future__ import annotations

import asyncio
import json
import math
import re
import secrets
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from pdserve.bench.errors import BenchError
from pdserve.bench.serve.choice import Kind, WorkloadChoice
from pdserve.bench.serve.client import Sampling, ServeClient
from pdserve.bench.serve.endpoint import Api, Endpoint
from pdserve.bench.serve.goodput import Slo, parse_slo
from pdserve.bench.serve.grpc_client import GrpcClient
from pdserve.bench.serve.sweep import TARGET, Search
from pdserve.bench.serve.workload import Limits
from pdserve.cli import serve_options as options
from pdserve.cli import workload_options as asked
from pdserve.cli.check import AsJson
from pdserve.cli.console import INTERRUPTED, err, write
from pdserve.cli.serve_progress import shown_runs
from pdserve.cli.serve_report import as_object, show
from pdserve.cli.target import Choice, Target, asks_router
from pdserve.cli.unused_options import check_used
from pdserve.cli.up import interrupted
from pdserve.client import Credentials

if TYPE_CHECKING:
    from pdserve.bench.serve.load_test import LoadTest, Report

_PROMPT_SEEDS = 2**31
_CLUSTER_TIMEOUT_S = 20.0


@asks_router
def serve(
    chosen: Choice,
    context: typer.Context,
    objectives: options.MoreObjectives = None,
    url: options.Url = None,
    http: options.Http = False,
    api: options.AsApi = Api.COMPLETIONS,
    model: options.Model = None,
    api_key: options.ApiKey = None,
    extra_body: options.ExtraBody = "{}",
    timeout: options.Timeout = 600.0,
    workload: asked.AsWorkload = asked.Made.RANDOM,
    trace: asked.TraceFile = None,
    sharegpt: asked.ShareGpt = None,
    tokenizer: asked.Tokenizer = None,
    requests: asked.NumRequests = None,
    input_tokens: asked.InputTokens = 512,
    output_tokens: asked.OutputTokens = 128,
    range_ratio: asked.RangeRatio = 0.0,
    prefix_tokens: asked.PrefixTokens = 512,
    prefixes: asked.NumPrefixes = 1,
    trace_start: asked.TraceStart = 0.0,
    block_tokens: asked.BlockTokens = None,
    max_input_tokens: asked.MaxInput = None,
    max_output_tokens: asked.MaxOutput = None,
    text: asked.AsText = False,
    vocab_size: asked.VocabSize = None,
    temperature: asked.Temperature = 0.0,
    stop_at_eos: asked.StopAtEos = False,
    rate: options.Rate = None,
    burstiness: options.Burstiness = 1.0,
    seed: options.Seed = 0,
    prompt_seed: options.PromptSeed = None,
    goodput: options.GoodputOption = None,
    find_goodput: options.FindGoodput = False,
    rates: options.Rates = None,
    target: options.Target = TARGET,
    plot: options.Plot = None,
    output: options.Output = None,
    as_json: AsJson = False,
) -> None:
    """Load a running server as its users would, and report what they felt.

    The loop is open: each request is sent at its time, whatever is outstanding then, and TTFT counts from
    that time. Speaks to a cluster over gRPC, or over HTTP to any server with OpenAI's API. Ctrl-C ends
    it with what there is by then.

    Examples:
        pdserve bench serve --rate 2 --requests 200 --input-tokens 500 --output-tokens 100
        pdserve bench serve --trace AzureLLMInferenceTrace_conv.csv --requests 200 --rate 0.5
        pdserve bench serve --workload conversation --goodput ttft:2000 tpot:40 --find-goodput --plot g.png
        pdserve bench serve --url http://127.0.0.1:8000 --rate 2 --json
    """
    # numpy comes with these, and aiohttp below: half a second that other commands need not wait for.
    from pdserve.bench.serve.load_test import LoadTest
    from pdserve.bench.serve.plot import check_can_plot, plot_report

    if trace is not None and sharegpt is not None:
        raise typer.BadParameter("give --trace or --sharegpt, not both")
    kind = Kind(workload.value)
    if trace is not None or sharegpt is not None:
        kind = Kind.TRACE if trace is not None else Kind.DIALOGUES
    check_used(context, kind, is_http=url is not None or http or api is Api.CHAT)
    choice = WorkloadChoice(
        kind=kind,
        file=trace or sharegpt,
        num_requests=requests,
        rate=rate,
        burstiness=burstiness,
        num_prompt_tokens=input_tokens,
        num_tokens=output_tokens,
        range_ratio=range_ratio,
        num_prefixes=prefixes,
        num_prefix_tokens=prefix_tokens,
        trace_start_s=trace_start,
        block_tokens=block_tokens,
        limits=Limits(max_input_tokens, max_output_tokens),
        tokenizer=tokenizer,
        is_text=text or api is Api.CHAT,
        seed=seed,
    )
    slo = _slo(goodput, objectives)
    test = LoadTest(
        choice=choice,
        prompt_seed=secrets.randbelow(_PROMPT_SEEDS) if prompt_seed is None else prompt_seed,
        vocab_size=vocab_size,
        slo=slo,
        search=_search(find_goodput, rates, rate, target, slo),
    )
    if url is not None and (chosen.address is not None or chosen.name is not None or http):
        raise typer.BadParameter("--url stands for itself: no --address, --name or --http beside it")
    router = None if url is not None else chosen.target()
    shown = chosen.credentials if url is None else replace(chosen.credentials, api_key=api_key)
    where = _Where(url, router, http, api, model, shown, options.parse_object(extra_body))
    for path in filter(None, (plot, output)):
        _check_folder(path)
    if plot is not None:
        check_can_plot(plot)
    signal.signal(signal.SIGTERM, interrupted)
    kept: list[Report] = []
    sampling = Sampling(temperature, not stop_at_eos)
    try:
        kept.append(asyncio.run(_measure(test, where, sampling, timeout, kept.append)))
    except KeyboardInterrupt:
        err.print("interrupted: what was out has been cancelled")
        if not kept:
            raise typer.Exit(INTERRUPTED) from None
    report = kept[-1]
    try:
        if as_json:
            write(json.dumps(as_object(report)) + "\n")
        else:
            show(report)
    finally:  # `| head` reads no more: what took so long to measure is kept all the same
        if output is not None:
            output.write_text(json.dumps(as_object(report, with_requests=True)) + "\n")
        if plot is not None:
            plot_report(report, plot)
    if not report.is_whole:
        raise typer.Exit(INTERRUPTED)


@dataclass(frozen=True, slots=True)
class _Where:
    url: str | None
    router: Target | None  # of a cluster
    is_http: bool
    api: Api
    model: str | None
    # Over HTTP.
    shown: Credentials
    extra_body: dict[str, object]


def _slo(parts: list[str] | None, more: list[str] | None) -> Slo | None:
    """`--goodput ttft:2000 tpot:40`: what stands behind the first is an argument to the parser."""
    if more and not parts:
        told = " ".join(more)
        raise typer.BadParameter(
            f"{told}: objectives are given by --goodput, like --goodput ttft:2000 tpot:40"
        )
    try:
        return parse_slo([*parts, *(more or ())]) if parts else None
    except BenchError as error:
        raise typer.BadParameter(f"--goodput {error}") from None


def _search(
    is_wanted: bool, rates: str | None, rate: float | None, target: float, slo: Slo | None
) -> Search | None:
    if not is_wanted:
        if rates is not None:
            raise typer.BadParameter("--rates is for --find-goodput")
        return None
    if slo is None:
        raise typer.BadParameter("--find-goodput wants --goodput")
    start = 1.0 if rate is None or math.isinf(rate) else rate
    return Search(options.parse_rates(rates) or (start,), target)


def _check_folder(path: Path) -> None:
    if not path.absolute().parent.is_dir():
        raise BenchError(f"{path}: there is no such folder")


async def _measure(
    test: LoadTest, where: _Where, sampling: Sampling, timeout_s: float, kept: Callable[[Report], None]
) -> Report:
    async with _client(where, sampling, timeout_s) as client:
        with shown_runs() as progress:
            return await test.measure(client, progress, kept)


@asynccontextmanager
async def _client(where: _Where, sampling: Sampling, timeout_s: float) -> AsyncIterator[ServeClient]:
    if where.url is None and where.router is not None and not where.is_http and where.api is not Api.CHAT:
        async with GrpcClient(where.router.client(), sampling, timeout_s) as over_grpc:
            yield over_grpc
        return
    from pdserve.bench.serve.http_client import HttpClient

    url = await _http_of(where.router) if where.url is None else where.url
    shown = where.shown
    endpoint = Endpoint(
        url, where.api, where.model, shown.api_key, where.extra_body, shown.ca, shown.cert, shown.key
    )
    async with HttpClient(endpoint, sampling, timeout_s) as over_http:
        yield over_http


async def _http_of(router: Target | None) -> str:
    if router is None:
        raise BenchError("there is neither a URL nor a cluster")
    async with router.client() as client:
        cluster = await client.get_cluster(timeout=_CLUSTER_TIMEOUT_S)
    if cluster.http_url is None:
        raise BenchError(f"cluster {cluster.name} serves no HTTP: set router.http in its YAML")
    # What listens everywhere is found where gRPC was.
    host = "127.0.0.1" if router.address.startswith("unix:") else router.address.rpartition(":")[0]
    return re.sub(r"//(0\.0\.0\.0|\[::\]):", f"//{host}:", cluster.http_url)
