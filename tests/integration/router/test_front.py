"""The gRPC front: malformed requests, health, reflection, the controller's proxy and watch."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pdserve.client import Client, InvalidArgument, NotFound, Role, Unavailable, Unimplemented, WorkerState
from pdserve.v1 import cluster_pb2, generation_pb2
from pdserve.v1.errors import from_rpc_error
from router.bind import CannotBind
from router.front.server import RouterServer
from router.front.service import AdminService, GenerationService
from router.router import Router
from tests.integration.router.harness import Cluster, running, until
from tests.scripted_workers import expected
from tests.static_control import StaticControl

BAD: dict[str, tuple[object, dict[str, object]]] = {
    "empty text": ("", {}),
    "no tokens": ([], {}),
    "max_tokens 0": ("x", {"max_tokens": 0}),
    "max_tokens -1": ("x", {"max_tokens": -1}),
    "NaN temperature": ("x", {"temperature": math.nan}),
    "top_p 2": ("x", {"top_p": 2.0}),
    "id outside": ([512], {}),
    "id far outside": ([2**32 - 1], {}),
    "negative id": ([-1], {}),
    "10 MB of text": ("x" * 10_000_000, {}),
    "n 0": ("x", {"n": 0}),
    "n -1": ("x", {"n": -1}),
    "seed too large": ("x", {"seed": 2**64}),
    "half a surrogate": ("\ud800", {}),
    "an empty stop": ("x", {"stop": ""}),
    "empty chat message": ([{"role": "", "content": "x"}], {}),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_bad_request_is_refused_and_the_next_good_one_works(cluster: Cluster, name: str) -> None:
    prompt, options = BAD[name]
    with pytest.raises(InvalidArgument):
        await cluster.client.generate(prompt, **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument):
        async for _ in cluster.client.generate_stream(prompt, **options):  # type: ignore[arg-type]
            pass
    answer = await cluster.client.generate([1], max_tokens=3, seed=1)
    assert answer.token_ids == expected([1], 1, 3)


@pytest.mark.parametrize("raw", [b"\x1a\x02\xff\xfe", b"\x1a\x7f", b"\xff" * 40])
@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_bytes_that_are_no_message_are_an_invalid_argument(
    cluster: Cluster, raw: bytes, method: str
) -> None:
    async with grpc.aio.insecure_channel(cluster.server.address) as channel:
        path = f"/pdserve.v1.Generation/{method}"
        unary, stream = channel.unary_unary(path), channel.unary_stream(path)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await (unary(raw) if method == "Generate" else stream(raw).read())
        error = from_rpc_error(refused.value)
        assert isinstance(error, InvalidArgument)
        assert error.reason == "MALFORMED"
    await cluster.client.generate([1], max_tokens=3)


async def test_messages_that_are_too_large_are_refused_and_the_next_one_works(cluster: Cluster) -> None:
    """Before they are parsed; far too large ones by gRPC itself, before they are here."""
    sizes = {
        ("pdserve.v1.Generation/Generate", 6 << 20): grpc.StatusCode.INVALID_ARGUMENT,
        ("pdserve.v1.Generation/Generate", 17 << 20): grpc.StatusCode.RESOURCE_EXHAUSTED,
        ("pdserve.v1.Admin/ScalePool", 65 << 10): grpc.StatusCode.INVALID_ARGUMENT,
        ("grpc.health.v1.Health/Check", 2 << 10): grpc.StatusCode.INVALID_ARGUMENT,
        # It would keep the name of the service that is asked for as long as it is open.
        ("grpc.health.v1.Health/Watch", 2 << 10): grpc.StatusCode.INVALID_ARGUMENT,
    }
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(cluster.server.address, options=options) as channel:
        for (method, size), code in sizes.items():
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary(f"/{method}")(b"\0" * size, timeout=60)
            assert refused.value.code() is code
            await cluster.client.generate([1], max_tokens=3)


async def test_what_no_check_looks_at_goes_to_no_worker(cluster: Cluster) -> None:
    """Fields that nobody knows could be of any size, and each of n sequences would have them."""
    request = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[1]), n=2)
    request.stop.max_tokens = 3
    unknown = b"\xc2\x3e\x04abcd"  # field 1000
    for part in (request.sampling, request.stop, request.output):
        part.MergeFromString(unknown)
    async with grpc.aio.insecure_channel(cluster.server.address) as channel:
        raw = request.SerializeToString()
        assert raw.count(unknown) == 3
        await channel.unary_unary("/pdserve.v1.Generation/Generate")(raw, timeout=60)
    assert len(cluster.d.specs) == 2
    assert all(unknown not in spec.SerializeToString() for spec in cluster.d.specs)


async def test_fields_without_code_and_other_models_are_refused(cluster: Cluster) -> None:
    with pytest.raises(Unimplemented):
        await cluster.client.generate("x", prompt_logprobs=True)
    with pytest.raises(NotFound):
        await cluster.client.generate("x", model="m" * 100_000)


async def test_reflection_and_handlers_match_the_protos(cluster: Cluster) -> None:
    for service in (GenerationService(cluster.router), AdminService(cluster.router)):
        module = generation_pb2 if isinstance(service, GenerationService) else cluster_pb2
        methods = module.DESCRIPTOR.services_by_name[service.NAME.rpartition(".")[2]].methods_by_name
        assert set(service.handlers()) == set(methods)
    async with grpc.aio.insecure_channel(cluster.server.address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = (await call.read()).list_services_response.service
        await call.done_writing()
        names = {each.name for each in listed}
    assert {"pdserve.v1.Generation", "pdserve.v1.Admin", "grpc.health.v1.Health"} <= names


async def test_health_follows_what_could_be_served(model_dir: Path) -> None:
    async with running(model_dir) as cluster, grpc.aio.insecure_channel(cluster.server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)

        async def becomes(status: int) -> None:
            async for answer in health.Watch(health_pb2.HealthCheckRequest(service="pdserve.v1.Generation")):
                if answer.status == status:
                    return

        await asyncio.wait_for(becomes(health_pb2.HealthCheckResponse.SERVING), 5)
        await cluster.p.stop()
        await asyncio.wait_for(becomes(health_pb2.HealthCheckResponse.NOT_SERVING), 5)
        await cluster.p.start()
        await asyncio.wait_for(becomes(health_pb2.HealthCheckResponse.SERVING), 5)


async def test_admin_is_handed_on_to_the_controller(cluster: Cluster) -> None:
    seen = await cluster.client.get_cluster()
    pool = seen.pool(Role.PREFILL)
    assert pool is not None
    assert [worker.id for worker in pool.workers] == ["prefill-0"]
    assert pool.workers[0].state is WorkerState.READY
    await cluster.client.scale_pool(Role.DECODE, 3)
    assert cluster.control.scaled == [(cluster_pb2.ROLE_DECODE, 3)]
    await cluster.client.drain_worker("decode-0")
    assert cluster.control.drained == ["decode-0"]
    with pytest.raises(NotFound, match="decode-9"):
        await cluster.client.drain_worker("decode-9")
    with pytest.raises(InvalidArgument):
        await cluster.client.scale_pool(Role.DECODE, -1)


async def test_the_controllers_death_stops_no_request_and_it_is_watched_again(cluster: Cluster) -> None:
    await cluster.control.stop()
    answer = await cluster.client.generate([1], max_tokens=5, seed=1)
    assert answer.token_ids == expected([1], 1, 5)
    with pytest.raises(Unavailable):
        await cluster.client.get_cluster(timeout=5)
    num_watches = cluster.control.num_watches
    await cluster.control.start()
    await until(lambda: cluster.control.num_watches > num_watches)
    await cluster.client.get_cluster()
    await cluster.client.generate([1], max_tokens=5)


async def test_a_new_controller_is_found_where_it_says_that_it_serves(
    model_dir: Path, tmp_path: Path
) -> None:
    file = tmp_path / "control.json"
    async with running(model_dir, num_prefills=0, num_decodes=0, control=None, control_file=file) as cluster:
        with pytest.raises(Unavailable, match="not started yet"):
            await cluster.client.get_cluster(timeout=5)
        file.write_text(json.dumps({"address": cluster.control.address}))
        await until(lambda: cluster.control.num_watches > 0)
        async with StaticControl("elsewhere") as another:
            assert another.address != cluster.control.address
            await cluster.control.stop()
            file.write_text(json.dumps({"address": another.address}))
            await until(lambda: another.num_watches > 0)
            assert (await cluster.client.get_cluster(timeout=5)).name == "elsewhere"


async def test_a_taken_port_is_an_error_that_names_it(cluster: Cluster) -> None:
    config = cluster.router.config.model_copy(update={"grpc": cluster.server.address})
    router = Router(config)
    with pytest.raises(CannotBind, match=cluster.server.address):
        async with RouterServer(router):
            pass


async def test_closing_the_stream_cancels_the_request(cluster: Cluster) -> None:
    cluster.d.step_s = 0.01
    stream = cluster.client.generate_stream([1], max_tokens=300)
    async for _ in stream:
        break
    await stream.aclose()
    await until(lambda: not cluster.d.reserved)


async def test_what_the_router_does_not_use_itself_passes_through(cluster: Cluster) -> None:
    await cluster.client.generate(
        [1], max_tokens=2, logprobs=5, logit_bias={3: 1.5}, stop_token_ids=[9], stop="zz", min_p=0.25
    )
    (spec,) = cluster.d.specs
    assert spec.output.logprobs == 5
    assert dict(spec.sampling.logit_bias) == {3: 1.5}
    assert spec.sampling.min_p == 0.25
    assert spec.sampling.HasField("seed")
    assert list(spec.stop.stop_token_ids) == [9]
    assert list(spec.stop.stop) == []


async def test_nobody_answers_at_the_address() -> None:
    async with Client("127.0.0.1:9") as client:
        with pytest.raises(Unavailable):
            await client.generate("x", timeout=5)
