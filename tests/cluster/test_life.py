"""One cluster from `up` to `down`, on the real command line with the packaged model.

The tests stand in the order of a cluster's life; each leaves it at 1P1D and whole.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import stat
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest

from cluster.nodes.processes import is_running
from pdserve import Client
from pdserve.client import ChatMessage, Cluster, Finished, PdserveError, Role
from pdserve.v1 import worker_pb2, worker_pb2_grpc
from tests.cluster.commands import Commands, free_port, is_ready, write_config
from tests.integration.http.scraped import scrape

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
QUESTION = "What is the capital of France?"
RESULT_KEYS = {
    *("text", "token_ids", "finish_reason", "usage", "timings"),
    *("prefill_worker", "decode_worker", "num_resumes"),
}
WORKER_KEYS = {
    *(
        "id",
        "pid",
        "address",
        "node",
        "state",
        "detail",
        "device",
        "running",
        "waiting",
        "kv_blocks_used",
        "kv_blocks_quarantined",
        "kv_blocks_total",
    ),
    *(
        "tokens_prefilled",
        "tokens_decoded",
        "kv_bytes_sent",
        "kv_bytes_received",
        "reservations",
        "rss_bytes",
    ),
    *("draft_tokens", "accepted_draft_tokens", "transfers", "kv_routes", "kernels", "speculation"),
}


@dataclass(frozen=True)
class Running:
    commands: Commands
    address: str
    http: str
    config: Path
    told_by_up: str


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    commands = Commands(tmp_path_factory.mktemp("state"))
    port, http_port = free_port(), free_port()
    config = write_config(commands.home, "life", port, http_port=http_port)
    try:
        done = commands.run("up", str(config))
        assert done.returncode == 0, done.stderr
        told = done.stdout + done.stderr
        yield Running(commands, f"127.0.0.1:{port}", f"127.0.0.1:{http_port}", config, told)
    finally:
        commands.run("down", "life")


def test_the_very_next_request_is_served(running: Running) -> None:
    assert "Paris" in running.commands.succeed("generate", "--chat", QUESTION)
    assert running.address in running.told_by_up
    assert "prefill-0" in running.told_by_up


def test_generate_json_is_one_object_with_all_that_was_promised(running: Running) -> None:
    answer = json.loads(
        running.commands.succeed("generate", "Once upon a time", "--max-tokens", "12", "--json")
    )
    assert set(answer) == RESULT_KEYS
    assert answer["finish_reason"] == "length"
    assert len(answer["token_ids"]) == answer["usage"]["completion_tokens"] == 12
    assert answer["timings"]["transfer_bytes"] > 0
    assert (answer["prefill_worker"], answer["decode_worker"]) == ("prefill-0", "decode-0")
    ids = ",".join(str(each) for each in answer["token_ids"])
    again = running.commands.succeed("generate", "--token-ids", ids, "--max-tokens", "3", "--explain")
    assert "prefill-0 → decode-0" in again
    assert "3 tokens were the limit" in again


def test_both_pools_counted_their_share(running: Running) -> None:
    status = json.loads(running.commands.succeed("status", "--json"))
    assert set(status) == {"name", "router", "routers", "pools"}
    assert status["router"] == {"grpc": running.address, "http": running.http, "tls": False}
    prefill, decode = (status["pools"][role]["workers"][0] for role in ("prefill", "decode"))
    assert set(prefill) == set(decode) == WORKER_KEYS
    assert prefill["tokens_prefilled"] > 0
    assert prefill["tokens_decoded"] == 0
    assert decode["tokens_decoded"] > 0
    assert decode["tokens_prefilled"] == 0
    assert prefill["kv_bytes_sent"] == decode["kv_bytes_received"] > 0
    assert [route["to"] for route in prefill["kv_routes"]] == [decode["id"]]
    assert prefill["kv_blocks_used"] == decode["kv_blocks_used"] == decode["reservations"] == 0
    assert "prefill-0" in running.commands.succeed("status")


def test_metrics_of_every_process_are_at_the_routers_one_address(running: Running) -> None:
    assert f"http://{running.http}/metrics" in running.told_by_up
    seen = asyncio.run(scrape(running.http))
    for worker in ("prefill-0", "decode-0"):
        assert seen.value("pdserve_worker_up", worker=worker) == 1
    memory = seen.families["process_resident_memory_bytes"].samples
    assert {sample.labels["role"] for sample in memory} == {"router", "prefill", "decode"}
    assert len({sample.value for sample in memory}) == 3
    assert seen.value("pdserve_pool_workers", state="ready") == 2
    sent, received = (
        seen.value("pdserve_kv_transfer_bytes_total", transport="shm", direction=direction)
        for direction in ("sent", "received")
    )
    assert sent == received > 0
    assert seen.value("pdserve_request_success_total") == seen.value(
        "pdserve_time_to_first_token_seconds_count"
    )
    assert seen.value("pdserve_request_failures_total") == 0


def test_the_log_files_follow_a_request_and_have_none_of_its_words(running: Running) -> None:
    assert "Paris" in running.commands.succeed("generate", "--chat", QUESTION)
    folder = running.commands.home / "pdserve" / "life" / "logs"
    logs = {path.stem: path.read_text() for path in folder.glob("*.log")}
    ids = re.search(r"PREFILL_BEGIN (request_id=\w+ transfer_id=\w+) ", logs["router"])
    assert ids is not None
    for worker, moment in (("prefill-0", "TRANSFER_END"), ("decode-0", "FINISHED")):
        assert f"{moment} {ids.group(1)} epoch=1 worker={worker} " in logs[worker]
    for text in logs.values():
        assert QUESTION not in text
        assert "Paris" not in text


def test_a_second_up_of_the_name_and_of_the_port_are_refused(running: Running) -> None:
    commands = running.commands
    assert 'the cluster "life" runs already' in commands.fail("up", str(running.config))
    port = int(running.address.rpartition(":")[2])
    other = write_config(commands.home, "other", port)
    assert f"router.grpc: {running.address} cannot be used" in commands.fail("up", str(other))
    assert commands.processes("other") == []
    assert "Paris" in commands.succeed("generate", "--chat", QUESTION)


def test_scaling_up_and_down_under_load_loses_no_request(running: Running) -> None:
    async def scenario() -> None:
        stop = asyncio.Event()
        clients = [asyncio.ensure_future(_keep_asking(running.address, n, stop)) for n in range(8)]
        for pools in (("prefill=2", "decode=2"), ("prefill=1", "decode=1")):
            steps = await asyncio.to_thread(running.commands.succeed, "scale", *pools)
            for worker in ("prefill-1", "decode-1"):
                assert worker in steps
        stop.set()
        for num_answers in await asyncio.gather(*clients):
            assert num_answers > 0
        await _until(running.address, _is_whole)

    asyncio.run(scenario())


@pytest.mark.full
def test_a_rolling_restart_under_load_loses_no_request(running: Running) -> None:
    async def scenario() -> None:
        async with Client(running.address) as client:
            before = await client.get_cluster(timeout=10)
        stop = asyncio.Event()
        clients = [asyncio.ensure_future(_keep_asking(running.address, n, stop)) for n in range(4)]
        told = await asyncio.to_thread(running.commands.succeed, "restart")
        stop.set()
        for num_answers in await asyncio.gather(*clients):
            assert num_answers > 0
        assert "2 of 2 workers are new" in told
        await _until(running.address, _is_whole)
        async with Client(running.address) as client:
            assert not _pids(await client.get_cluster(timeout=10)) & _pids(before)

    asyncio.run(scenario())


@pytest.mark.full
def test_a_restarted_router_ends_what_it_has_and_another_serves_at_its_ports(running: Running) -> None:
    async def scenario() -> None:
        async with Client(running.address) as client:
            (before,) = (await client.get_cluster(timeout=10)).routers
            asked = asyncio.ensure_future(_ask_for_long(client, 1))
            await _until(running.address, lambda now: _num_running(now) > 0)
            told = await asyncio.to_thread(running.commands.succeed, "restart", "--router")
            assert "1 of 1 routers are new" in told
            ended = await asked
            assert ended.finished is not None
            assert ended.finished.num_resumes == 0
        async with Client(running.address) as client:
            await _until(running.address, lambda now: now.routers[0].pid not in (None, before.pid))

    asyncio.run(scenario())
    assert "Paris" in running.commands.succeed("generate", "--chat", QUESTION)


async def _keep_asking(address: str, number: int, stop: asyncio.Event) -> int:
    """Any error of any request fails the test."""
    num_answers = 0
    async with Client(address) as client:
        while not stop.is_set():
            prompt = f"Client {number}, request {num_answers}: tell me a story about a river."
            answer = await client.generate(
                prompt, temperature=0.0, max_tokens=24, ignore_eos=True, timeout=120.0
            )
            assert answer.usage.completion_tokens == 24
            num_answers += 1
    return num_answers


@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL])
def test_a_killed_worker_is_replaced_and_its_requests_end_in_time(running: Running, role: Role) -> None:
    async def scenario() -> None:
        async with Client(running.address) as client:
            before = await client.get_cluster(timeout=10)
            victim = before.pool(role).workers[0]  # type: ignore[union-attr]
            asked = [asyncio.ensure_future(_ask_for_long(client, n)) for n in range(4)]
            await _until(running.address, lambda now: _num_running(now) > 0)
            os.kill(victim.pid, signal.SIGKILL)
            killed = time.monotonic()
            for ended in await asyncio.gather(*asked):
                # Either the stream was resumed, or its client was told in time.
                assert ended.finished is not None or (ended.reason and ended.at - killed < 5.0)
            await _until(running.address, lambda now: _is_whole(now) and victim.pid not in _pids(now))
            answer = await client.generate(
                [ChatMessage("user", QUESTION)], temperature=0.0, max_tokens=20, timeout=60
            )
            assert "Paris" in answer.text

    asyncio.run(scenario())


@dataclass(frozen=True)
class Ended:
    finished: Finished | None
    at: float
    reason: str | None = None


async def _ask_for_long(client: Client, number: int) -> Ended:
    finished: Finished | None = None
    try:
        events = client.generate_stream(
            f"Number {number}. " + "The river flows. " * 60,
            temperature=0.0,
            max_tokens=100,
            ignore_eos=True,
            timeout=120.0,
        )
        async for event in events:
            if isinstance(event, Finished):
                finished = event
    except PdserveError as error:
        reason = error.reason  # every failure says why, in a word that programs can read
        return Ended(None, time.monotonic(), reason)
    return Ended(finished, time.monotonic())


def test_a_killed_router_comes_back(running: Running) -> None:
    _router_process(running).kill()
    assert "Paris" in _answer_of_the_next_router(running)


@pytest.mark.full
def test_a_router_that_hangs_is_killed_and_comes_back(running: Running) -> None:
    router = _router_process(running)
    router.suspend()
    router.wait(60)
    assert "Paris" in _answer_of_the_next_router(running)


def test_a_killed_controller_is_replaced_and_no_request_notices(running: Running) -> None:
    async def scenario() -> None:
        async with Client(running.address) as client:
            before = await client.get_cluster(timeout=10)
            asked = [asyncio.ensure_future(_ask_for_long(client, n)) for n in range(2)]
            await _until(running.address, lambda now: _num_running(now) > 0)
            killed = _process_of(running, "Controller")
            killed.kill()
            answer = await client.generate(
                [ChatMessage("user", QUESTION)], temperature=0.0, max_tokens=20, timeout=60
            )
            assert "Paris" in answer.text
            for ended in await asyncio.gather(*asked):
                assert ended.finished is not None
                assert ended.finished.num_resumes == 0
            # The one that takes its place has adopted the same processes, and may do with them what it likes.
            await _once(lambda: _answers_whole(client))
            after = await client.get_cluster(timeout=10)
            assert _pids(after) == _pids(before)
            assert _process_of(running, "Controller") != killed
            await asyncio.to_thread(running.commands.succeed, "scale", "decode=2")
            await asyncio.to_thread(running.commands.succeed, "scale", "decode=1")
            assert _pids(await client.get_cluster(timeout=10)) == _pids(before)

    asyncio.run(scenario())


def test_the_router_comes_back_when_its_keeper_is_killed(running: Running) -> None:
    async def scenario() -> None:
        async with Client(running.address) as client:
            (before,) = (await client.get_cluster(timeout=10)).routers
            _process_of(running, "RouterActor").kill()
            # The old one still ends what it has, for some seconds, and may be asked meanwhile.
            await _once(lambda: _is_another_router(client, before.pid))

    asyncio.run(scenario())
    assert "Paris" in running.commands.succeed("generate", "--chat", QUESTION)


def _router_process(running: Running) -> psutil.Process:
    return next(p for p in running.commands.processes("life") if "router" in p.cmdline()[1:3])


def _answer_of_the_next_router(running: Running) -> str:
    async def ask() -> str:
        async with Client(running.address) as client:
            answer = await client.generate(
                [ChatMessage("user", QUESTION)], temperature=0.0, max_tokens=20, timeout=60
            )
            return answer.text

    return asyncio.run(_retried(ask))


def _process_of(running: Running, actor: str) -> psutil.Process:
    """The one that runs this actor: Ray names it so."""
    (found,) = [p for p in running.commands.processes("life") if f"ray::{actor}" in " ".join(p.cmdline())]
    return found


async def _is_another_router(client: Client, pid: int | None) -> bool:
    try:
        return (await client.get_cluster(timeout=10)).routers[0].pid not in (None, pid)
    except PdserveError:
        return False


async def _answers_whole(client: Client) -> bool:
    try:
        return _is_whole(await client.get_cluster(timeout=10))
    except PdserveError:
        return False


async def _once(is_so: Callable[[], Awaitable[bool]], timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not await is_so():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


def test_the_clusters_secret_is_in_its_file_and_told_nowhere(running: Running) -> None:
    record, file = running.commands.record("life"), running.commands.home / "pdserve" / "life" / "secret"
    assert record is not None
    assert record.ray_folder is not None
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    secret = file.read_bytes()
    read = [
        path
        for folder in (file.parent, record.ray_folder)
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    ]
    assert {"controller.log", "decode-0.log", "router.log", "raylet.out"} <= {path.name for path in read}
    assert [path for path in read if secret in path.read_bytes()] == [file]
    for process in running.commands.processes("life"):
        about = Path("/proc", str(process.pid))
        assert secret not in (about / "cmdline").read_bytes() + (about / "environ").read_bytes()


def test_nobody_reaches_a_workers_port_without_the_secret(running: Running) -> None:
    status = json.loads(running.commands.succeed("status", "--json"))
    for role in ("prefill", "decode"):
        address = status["pools"][role]["workers"][0]["address"]
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as refused:
            worker_pb2_grpc.WorkerStub(channel).Describe(worker_pb2.DescribeRequest(), timeout=20)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_drain_takes_the_worker_and_scale_brings_one_back(running: Running) -> None:
    commands = running.commands
    assert "decode-0" in commands.succeed("drain", "decode-0")
    status = json.loads(commands.succeed("status", "--json"))
    assert status["pools"]["decode"] == {"target": 0, "workers": []}
    assert "there is no worker" in commands.fail("drain", "decode-7")
    commands.succeed("scale", "decode=1")
    assert "Paris" in commands.succeed("generate", "--chat", QUESTION)


def test_down_ends_every_process_and_says_so_twice(running: Running) -> None:
    commands = running.commands
    record = commands.record("life")
    processes = commands.processes("life")
    assert record is not None
    assert len(processes) >= 8  # Ray's four, controller, two workers, router and its keeper
    assert record.ray_folder is not None
    assert record.ray_folder.exists()
    assert "life is down" in commands.succeed("down")
    assert not (commands.home / "pdserve" / "life" / "secret").exists()
    assert [process for process in processes if is_running(process)] == []
    assert not record.ray_folder.exists()
    assert "no cluster runs here" in commands.succeed("down")
    assert 'the cluster "life" is down already' in commands.succeed("down", "life")
    assert "no cluster runs here" in commands.fail("status")


def _is_whole(cluster: Cluster) -> bool:
    return all(len(pool.workers) == 1 and is_ready(pool.workers[0]) for pool in cluster.pools)


def _pids(cluster: Cluster) -> set[int]:
    return {worker.pid for pool in cluster.pools for worker in pool.workers}


def _num_running(cluster: Cluster) -> int:
    return sum(worker.load.num_running for pool in cluster.pools for worker in pool.workers)


async def _until(address: str, is_true: Callable[[Cluster], bool], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    async with Client(address) as client:
        while not is_true(cluster := await client.get_cluster(timeout=10)):
            assert time.monotonic() < deadline, cluster
            await asyncio.sleep(0.1)


async def _retried(ask: Callable[[], Awaitable[str]], timeout_s: float = 30.0) -> str:
    """While the router is away, calls end at once."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return await ask()
        except PdserveError:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
