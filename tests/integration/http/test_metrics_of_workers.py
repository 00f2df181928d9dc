"""/metrics of a router on real workers: their own metrics beside its own, and what docs/ says of them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from promql_parser import Matcher, MatchOp, VectorSelector

from engine.config import ModelConfig
from engine.loading import LoadedModel, load_model
from router.metrics import scrape as scraping
from tests.integration.http.scraped import Scraped, scrape
from tests.integration.router.harness import until
from tests.models import tiny_model
from tests.queries import DOCS, Query, alert_queries, dashboard_queries
from tests.serving import Serving, serving
from worker.identity import Role

ROLES = (Role.PREFILL, Role.DECODE, Role.DECODE)
# Prometheus' own, of each address that it scrapes.
OF_PROMETHEUS = {"up"}
# By its configuration.
LABELS_OF_PROMETHEUS = {"cluster"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(ModelConfig(id=str(folder), device="cpu"))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers share one process here, with a machine that may be busy."""
    monkeypatch.setattr(scraping, "TIMEOUT_S", 30.0)


@pytest_asyncio.fixture
async def cluster(folder: Path, loaded: LoadedModel) -> AsyncIterator[Serving]:
    async with serving(folder, loaded, ROLES, router={"http": "127.0.0.1:0"}) as cluster:
        yield cluster


async def ask(cluster: Serving, num_requests: int = 4) -> None:
    for seed in range(num_requests):
        await cluster.client.generate(
            list(range(60 + seed)), max_tokens=12, seed=seed, ignore_eos=True, timeout=60
        )
    # What follows the last token: blocks and reservations given back.
    await until(cluster.is_idle, 20)


async def test_workers_tell_at_the_routers_address_what_they_did(cluster: Serving) -> None:
    await ask(cluster)
    seen = await scrape(cluster.server.http_address)
    up = {sample.labels["worker"]: sample.value for sample in seen.families["pdserve_worker_up"].samples}
    assert up == {"prefill-0": 1, "decode-1": 1, "decode-2": 1}
    assert seen.value("pdserve_generation_tokens_total") == 48
    assert seen.value("pdserve_decoded_tokens_total", role="decode") == 44
    assert seen.value("pdserve_decoded_tokens_total", role="prefill") == 0
    assert seen.value("pdserve_prefilled_tokens_total", worker="prefill-0") > 0
    assert seen.value("pdserve_engine_step_sequences_sum", role="decode") == 44
    cached = seen.value("pdserve_prefix_cache_hits_total")
    computed = seen.value("pdserve_prefilled_tokens_total")
    assert cached + computed == seen.value("pdserve_prefix_cache_queries_total") == sum(range(60, 64))


async def test_both_ends_of_the_hand_over_agree(cluster: Serving) -> None:
    await ask(cluster)
    seen = await scrape(cluster.server.http_address)
    sent, received = ({"direction": name, "transport": "grpc"} for name in ("sent", "received"))
    nbytes = seen.value("pdserve_kv_transfer_bytes_total", **sent)
    assert nbytes == seen.value("pdserve_kv_transfer_bytes_total", **received) > 0
    assert seen.value("pdserve_kv_transfer_seconds_count", **sent) == 4
    assert seen.value("pdserve_kv_transfer_seconds_count", **received) == 4
    assert seen.value("pdserve_kv_decode_start_seconds_count") == 4
    assert seen.value("pdserve_request_decode_start_time_seconds_count") == 4
    assert seen.value("pdserve_request_decode_start_time_seconds_sum") == pytest.approx(
        seen.value("pdserve_kv_decode_start_seconds_sum")
    )
    assert 0 <= seen.value("pdserve_kv_transfer_hidden_bytes_total") <= nbytes


async def test_every_block_of_a_pool_is_in_one_state(cluster: Serving) -> None:
    await ask(cluster, 1)
    seen = await scrape(cluster.server.http_address)
    for worker in ("prefill-0", "decode-1", "decode-2"):
        assert seen.value("pdserve_kv_blocks", worker=worker) == 64
        assert seen.value("pdserve_kv_blocks", worker=worker, state="free") == 64
        assert seen.value("pdserve_kv_cache_usage_perc", worker=worker) == 0


async def test_scrapes_while_requests_run_disturb_nobody(cluster: Serving) -> None:
    async def answer(seed: int) -> tuple[int, ...]:
        prompt = list(range(30 + seed))
        options = {"max_tokens": 60, "seed": seed, "ignore_eos": True, "timeout": 60}
        return (await cluster.client.generate(prompt, **options)).token_ids  # type: ignore[arg-type]

    undisturbed = [await answer(seed) for seed in range(4)]
    scrapes = asyncio.gather(*(scrape(cluster.server.http_address) for _ in range(5)))
    assert await asyncio.gather(*(answer(seed) for seed in range(4))) == undisturbed
    for seen in await scrapes:
        assert seen.value("pdserve_worker_up") == 3


async def test_every_query_under_docs_finds_series_in_metrics(cluster: Serving) -> None:
    await ask(cluster)
    seen = await scrape(cluster.server.http_address)
    queries = [*dashboard_queries(), *alert_queries()]
    assert len(queries) > 50
    assert [problem for query in queries for problem in unmet(query, seen)] == []
    wrong = Query("wrong", 'sum by (nobody) (pdserve_nothing) + pdserve_kv_blocks{state="lost"}')
    assert len(list(unmet(wrong, seen))) == 3


def unmet(query: Query, seen: Scraped) -> list[str]:
    """What it asks for that is not there: a name, a label's value, a label to sum by."""
    problems: list[str] = []
    labels: set[str] = set()
    for selector in query.selectors():
        found = [sample.labels for sample in seen.samples if is_meant(selector, sample.name, sample.labels)]
        if not found and selector.name not in OF_PROMETHEUS:
            problems.append(f"{query.where}: no {selector}")
        labels.update(*found)
    problems += [
        f"{query.where}: no label {label}" for label in query.groupings() - labels - LABELS_OF_PROMETHEUS
    ]
    return problems


def is_meant(selector: VectorSelector, name: str, labels: dict[str, str]) -> bool:
    return selector.name == name and all(fits(each, labels) for each in selector.matchers.matchers)


def fits(matcher: Matcher, labels: dict[str, str]) -> bool:
    value = labels.get(matcher.name, "")
    if matcher.op is MatchOp.Equal or matcher.op is MatchOp.NotEqual:
        return (value == matcher.value) is (matcher.op is MatchOp.Equal)
    return (re.fullmatch(matcher.value, value) is not None) is (matcher.op is MatchOp.Re)


async def test_the_docs_name_every_metric_and_no_other(cluster: Serving) -> None:
    await ask(cluster, 1)
    seen = await scrape(cluster.server.http_address)
    there = {
        f"{name}_total" if family.type == "counter" else name
        for name, family in seen.families.items()
        if name.startswith("pdserve_")
    }
    told = re.findall(r"^\| `(pdserve_\w+)`", (DOCS / "metrics.md").read_text(), re.MULTILINE)
    assert sorted(told) == sorted(there)


async def test_labels_are_bounded_whatever_clients_send(cluster: Serving) -> None:
    await ask(cluster, 1)
    before = {sample.name for sample in (await scrape(cluster.server.http_address)).samples}
    num_before = len((await scrape(cluster.server.http_address)).samples)
    for index in range(8):
        await cluster.client.generate(
            [index, 2, 3], max_tokens=3, request_id=f"user-{index}", timeout=60, ignore_eos=True
        )
    after = await scrape(cluster.server.http_address)
    # The second decode worker may have had no hand-over before.
    new = {sample.name for sample in after.samples} - before
    assert new == set()
    assert len(after.samples) - num_before <= 12
    allowed = {
        *("model_name", "role", "worker", "le", "phase", "code", "finished_reason"),
        *("pool", "state", "transport", "direction"),
    }
    assert {label for sample in after.samples for label in sample.labels} <= allowed
