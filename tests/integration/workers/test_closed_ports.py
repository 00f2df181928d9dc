"""Without the cluster's secret nobody reaches anything at the ports of workers and controller: every handler
of every server is tried, as the servers themselves list them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest

from cluster.control import controller as controllers
from cluster.control.controller import Controller
from cluster.nodes.network import Bind
from cluster.trusted import make_secret, trust_files
from pdserve.v1.errors import Unauthenticated, from_rpc_error
from tests.integration.workers.mini_router import Cluster, Route, spec
from tests.integration.workers.served import Record
from tests.trusted import TRUST
from tests.unit.cluster.harness import config
from tests.unit.cluster.scripted_handles import Script
from trust.secret import KEY, Secret
from worker.identity import Role

WRONG: dict[str, tuple[tuple[str, str | bytes], ...]] = {
    "none": (),
    "another": (Secret.fresh().shown,),
    "empty": ((KEY, ""),),
    "a part of it": ((KEY, TRUST.secret.text[:-1]),),
    "twice": (TRUST.secret.shown, TRUST.secret.shown),
    "elsewhere": (("authorization", f"Bearer {TRUST.secret.text}"),),
}
WORKERS_METHODS = {
    "/pdserve.v1.PrefillWorker/Prefill",
    "/pdserve.v1.DecodeWorker/Reserve",
    "/pdserve.v1.DecodeWorker/Release",
    "/pdserve.v1.DecodeWorker/Subscribe",
    "/pdserve.v1.Worker/Describe",
    "/pdserve.v1.Worker/Metrics",
    "/pdserve.v1.KVTransfer/Push",
    "/pdserve.v1.KVTransfer/PushCollective",
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
}
CONTROL_METHODS = {
    f"/pdserve.v1.Control/{name}" for name in ("Watch", "GetCluster", "ScalePool", "DrainWorker")
}


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Record:
    """Before any server is made."""
    return Record(monkeypatch)


async def call(
    channel: grpc.aio.Channel,
    method: str,
    shown: tuple[tuple[str, str | bytes], ...],
    is_silent: bool = False,
) -> grpc.StatusCode:
    """How a call ends that sends an empty message, or `is_silent`, nothing and no end. On the wire it is the
    same whether one message goes or many."""
    ended = asyncio.Event()

    async def nothing() -> AsyncIterator[bytes]:
        await ended.wait()
        yield b""

    if is_silent:
        stream = channel.stream_stream(method, None, None)(nothing(), metadata=shown, timeout=5)
    else:
        stream = channel.unary_stream(method, None, None)(b"", metadata=shown, timeout=5)
    try:
        async for _ in stream:
            pass
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            told = from_rpc_error(error)
            assert isinstance(told, Unauthenticated)
            assert told.reason == "NO_CLUSTER_SECRET"
        return error.code()
    finally:
        ended.set()
    return grpc.StatusCode.OK


async def try_all(record: Record) -> set[str]:
    """Every method of every server, and one that is none, by whoever has not the secret. What was tried."""
    tried: set[str] = set()
    for server in record.servers:
        assert server.ports, "a server that listens nowhere"
        for port in server.ports:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                for method in sorted({*server.methods, "/nobody.v1.Knows/This"}):
                    for why, shown in WRONG.items():
                        code = await call(channel, method, shown)
                        assert code is grpc.StatusCode.UNAUTHENTICATED, (method, why, code)
                    silent = await call(channel, method, (), is_silent=True)
                    assert silent is grpc.StatusCode.UNAUTHENTICATED, f"{method} waits for a message first"
                    tried.add(method)
    return tried


async def test_every_handler_of_every_worker_refuses_who_has_no_secret(
    record: Record, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await cluster.prefill_worker()
    for transport in ("grpc", "auto", "collective"):
        await cluster.decode_worker(transport=transport)
    await cluster.decode_worker(role=Role.COLOCATED)
    assert await try_all(record) > WORKERS_METHODS
    assert "refused without the cluster's secret" in caplog.text
    # Nobody can fill a disk with refused calls, and what was shown is in no line.
    assert caplog.text.count("refused without") <= len(record.servers)
    assert not [each for each in (TRUST.secret.text[:-1], WRONG["another"][0][1]) if str(each) in caplog.text]


@pytest.mark.parametrize("transport", ["grpc", "collective", "auto"])
async def test_who_shows_the_secret_is_served_and_it_is_in_no_log(
    record: Record, cluster: Cluster, caplog: pytest.LogCaptureFixture, transport: str
) -> None:
    caplog.set_level(logging.DEBUG)
    prefill, decode = await cluster.prefill_worker(), await cluster.decode_worker(transport=transport)
    route = Route(cluster.prefill_stub(prefill), await cluster.subscribe(decode))
    answer = await route.generate(spec([5, 6, 7, 8] * 8, max_tokens=4))
    assert len(answer.ids) == 4
    for server in record.servers:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.ports[0]}") as channel:
            code = await call(channel, "/nobody.v1.Knows/This", (TRUST.secret.shown,))
            assert code is grpc.StatusCode.UNIMPLEMENTED
    assert caplog.text
    assert TRUST.secret.text not in caplog.text


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The controller itself in this process: of what it does to its own process and of Ray, nothing."""
    script = Script()
    monkeypatch.setattr(controllers, "die_with_parent", lambda: None)
    monkeypatch.setattr(controllers, "log_to", lambda *_: None)
    monkeypatch.setattr(controllers, "workers_of", lambda _: {})
    monkeypatch.setattr(controllers, "RayWorker", lambda _, spec: script.launch(spec))
    monkeypatch.setattr(controllers.Guard, "keep", _for_ever)
    make_secret(tmp_path)
    return tmp_path


async def _for_ever(_: object) -> None:
    await asyncio.Event().wait()


async def test_every_handler_of_the_controller_refuses_who_has_no_secret(
    record: Record, no_ray: Path
) -> None:
    wanted = config(0, 0)
    controller = Controller(wanted, str(no_ray), Bind.LOOPBACK)
    address = await controller.start()
    try:
        assert await try_all(record) > CONTROL_METHODS
        own = trust_files(wanted, no_ray).read().secret
        async with grpc.aio.insecure_channel(address) as channel:
            asked = "/pdserve.v1.Control/GetCluster"
            assert await call(channel, asked, (own.shown,)) is grpc.StatusCode.OK
            assert await call(channel, asked, (TRUST.secret.shown,)) is grpc.StatusCode.UNAUTHENTICATED
    finally:
        await controller.stop()
