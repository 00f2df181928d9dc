"""Over gRPC: who is let in by a key, by a certificate, and at the socket in the user's own folder."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Iterable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pdserve.client import Client, PdserveError, PermissionDenied, Role, Unauthenticated, Unavailable
from pdserve.v1 import cluster_pb2, generation_pb2
from pdserve.v1.errors import from_rpc_error
from router.access import changes
from router.bind import unix_target
from tests.certificates import Authority, Pair
from tests.integration.access.callers import Keys
from tests.integration.router.harness import Cluster, running
from tests.scripted_workers import expected

HEALTH, REFLECTION = "/grpc.health.v1.Health/", "/grpc.reflection.v1alpha.ServerReflection/"


async def outcome(cluster: Cluster, path: str, key: str | None) -> PdserveError | None:
    """Of an empty message: what else is wrong with it does not matter. Sent with the call: one that is
    written behind it can find the call over, and asyncio's client then tells of that, not of the status."""
    metadata = () if key is None else (("authorization", f"Bearer {key}"),)
    async with grpc.aio.insecure_channel(cluster.server.address) as channel:
        call = channel.unary_stream(path)(b"", metadata=metadata, timeout=5)
        try:
            await call.read()
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)
        finally:
            call.cancel()
    return None


def methods() -> Iterable[str]:
    for module, name in ((generation_pb2, "Generation"), (cluster_pb2, "Admin")):
        service = module.DESCRIPTOR.services_by_name[name]
        yield from (f"/{service.full_name}/{method}" for method in service.methods_by_name)


async def test_every_method_wants_a_key_with_its_own_permission(model_dir: Path, keys: Keys) -> None:
    async with running(model_dir, **keys.settings) as cluster:
        for path in methods():
            right, wrong = (keys.admin, keys.user) if ".Admin/" in path else (keys.user, keys.admin)
            for key in (None, "wrong", right + "x"):
                error = await outcome(cluster, path, key)
                assert isinstance(error, Unauthenticated), path
                assert error.reason == "UNAUTHENTICATED"
                assert key is None or key not in str(error)
            for key in (wrong, keys.scraper):
                error = await outcome(cluster, path, key)
                assert isinstance(error, PermissionDenied), path
                assert error.reason == "PERMISSION_DENIED"
            assert cluster.control.scaled == cluster.control.drained == []
            if path.endswith("/ScalePool"):
                await outcome(cluster, path, right)
                assert cluster.control.scaled.pop() == (cluster_pb2.ROLE_UNSPECIFIED, 0)
            else:
                error = await outcome(cluster, path, right)
                assert not isinstance(error, Unauthenticated | PermissionDenied), path


async def test_health_wants_no_key_and_reflection_wants_any(model_dir: Path, keys: Keys) -> None:
    async with running(model_dir, **keys.settings) as cluster:
        async with grpc.aio.insecure_channel(cluster.server.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            asked = reflection_pb2_grpc.ServerReflectionStub(channel)
            shown = (("authorization", f"Bearer {keys.scraper}"),)
            question = reflection_pb2.ServerReflectionRequest(list_services="")
            call = asked.ServerReflectionInfo(iter([question]), metadata=shown, timeout=5)
            assert (await call.read()).list_services_response.service
        assert isinstance(await outcome(cluster, f"{REFLECTION}ServerReflectionInfo", None), Unauthenticated)
        assert isinstance(await outcome(cluster, "/no.such.Service/Method", None), Unauthenticated)


async def test_the_client_shows_its_key_with_every_call(model_dir: Path, keys: Keys) -> None:
    async with running(model_dir, **keys.settings) as cluster:
        async with Client(cluster.server.address, api_key=keys.user) as client:
            answer = await client.generate([1], max_tokens=5, seed=1)
            assert answer.token_ids == expected([1], 1, 5)
            events = [event async for event in client.generate_stream([1], max_tokens=5, seed=1)]
            assert len(events) >= 3
            assert (await client.get_model()).id == "tiny"
            with pytest.raises(PermissionDenied, match="admin"):
                await client.scale_pool(Role.DECODE, 3)
        async with Client(cluster.server.address, api_key=keys.admin) as client:
            await client.get_cluster()
            await client.scale_pool(Role.DECODE, 3)
            await client.drain_worker("decode-0")
            with pytest.raises(PermissionDenied, match="generate"):
                await client.generate([1], max_tokens=5)
        async with Client(cluster.server.address) as client:
            with pytest.raises(Unauthenticated, match="API key is needed"):
                await client.generate([1], max_tokens=5)
        assert cluster.control.scaled == [(cluster_pb2.ROLE_DECODE, 3)]


def tls_settings(pair: Pair, client_ca: Path | None = None) -> dict[str, object]:
    return {"tls": {"cert": pair.cert, "key": pair.key, "client_ca": client_ca}}


async def test_tls_wants_the_right_authority_and_no_clear_text(
    model_dir: Path, pair: Pair, authority: Authority, tmp_path: Path
) -> None:
    async with running(model_dir, **tls_settings(pair)) as cluster:
        async with Client(cluster.server.address, ca=authority.cert) as client:
            answer = await client.generate([1], max_tokens=5, seed=1)
            assert answer.token_ids == expected([1], 1, 5)
        stranger = Authority(tmp_path, "stranger")
        for lost in (
            Client(cluster.server.address),
            Client(cluster.server.address, tls=True),
            Client(cluster.server.address, ca=stranger.cert),
        ):
            async with lost as client:
                with pytest.raises(Unavailable):
                    await client.generate([1], max_tokens=5, timeout=10)


async def test_mutual_tls_lets_in_those_with_a_certificate_only(
    model_dir: Path, pair: Pair, authority: Authority, tmp_path: Path
) -> None:
    ours, stranger = authority.issue("client"), Authority(tmp_path, "stranger").issue("client")
    async with running(model_dir, **tls_settings(pair, authority.cert)) as cluster:
        address, ca = cluster.server.address, authority.cert
        async with Client(address, ca=ca, cert=ours.cert, key=ours.key) as client:
            answer = await client.generate([1], max_tokens=5, seed=1)
            assert answer.token_ids == expected([1], 1, 5)
        for lost in (Client(address, ca=ca), Client(address, ca=ca, cert=stranger.cert, key=stranger.key)):
            async with lost as client:
                with pytest.raises(Unavailable):
                    await client.generate([1], max_tokens=5, timeout=10)
    with pytest.raises(ValueError, match="cert and key"):
        Client(address, ca=ca, cert=ours.cert)


async def test_a_renewed_certificate_is_used_for_new_connections(
    model_dir: Path, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "_LOOK_EVERY_S", 0.0)
    renewed_by = Authority(tmp_path, "renewed")
    folder = tmp_path / "router"
    folder.mkdir()
    pair = Pair(folder / "router.pem", folder / "router.key")
    move(authority.issue("first"), pair)
    new = renewed_by.issue("second")
    async with running(model_dir, **tls_settings(pair)) as cluster:
        await connect_anew(cluster, authority)
        # Half of a new pair is not taken.
        new.cert.replace(pair.cert)
        await connect_anew(cluster, authority)
        new.key.replace(pair.key)
        await connect_anew(cluster, renewed_by)


async def connect_anew(cluster: Cluster, trusted: Authority) -> None:
    tls = grpc.ssl_channel_credentials(trusted.cert.read_bytes())
    alone = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(cluster.server.address, tls, options=alone) as channel:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)


def move(made: Pair, to: Pair) -> None:
    made.cert.replace(to.cert)
    made.key.replace(to.key)


@pytest.mark.parametrize("is_deep", [False, True], ids=["short path", "path too long for a socket"])
async def test_the_local_socket_wants_nothing_and_is_its_users_alone(
    model_dir: Path, keys: Keys, pair: Pair, authority: Authority, tmp_path: Path, is_deep: bool
) -> None:
    folder = tmp_path / ("x" * 120 if is_deep else "x")
    folder.mkdir(mode=0o700)
    path = folder / "router.sock"
    guarded = {**tls_settings(pair, authority.cert), **keys.settings, "local_socket": path}
    async with running(model_dir, **guarded) as cluster:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        async with Client(unix_target(path)) as client:
            answer = await client.generate([1], max_tokens=5, seed=1)
            assert answer.token_ids == expected([1], 1, 5)
            await client.get_cluster()
        async with grpc.aio.insecure_channel(unix_target(path)) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            await health.Check(health_pb2.HealthCheckRequest(), timeout=5)
        async with Client(cluster.server.address, ca=authority.cert) as client:
            with pytest.raises(PdserveError):
                await client.generate([1], max_tokens=5, timeout=5)


async def test_a_connection_has_a_bounded_number_of_calls_at_once(model_dir: Path) -> None:
    async with running(model_dir, max_streams_per_connection=2) as cluster:
        cluster.d.step_s = 0.01
        streams = [cluster.client.generate_stream([1], max_tokens=300) for _ in range(2)]
        for stream in streams:
            await stream.__anext__()
        waiting = asyncio.ensure_future(cluster.client.get_model())
        # It is not refused: it waits for its turn.
        done, _ = await asyncio.wait({waiting}, timeout=0.3)
        assert not done
        async with grpc.aio.insecure_channel(
            cluster.server.address, options=[("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            await health.Check(health_pb2.HealthCheckRequest(), timeout=5)
        for stream in streams:
            await stream.aclose()
        assert (await asyncio.wait_for(waiting, 10)).id == "tiny"


@pytest.mark.parametrize("host", ["pd.example.org", "127.0.0.1"])
async def test_several_routers_are_asked_in_turn_and_known_by_one_name(
    model_dir: Path, authority: Authority, host: str
) -> None:
    pair = authority.issue(f"for-{host}", host=host)
    tls = {"cert": pair.cert, "key": pair.key}
    async with running(model_dir, tls=tls) as first, running(model_dir, tls=tls) as second:
        target = f"ipv4:{first.server.address},{second.server.address}"
        async with Client(target, ca=authority.cert, server_name=host) as client:
            for _ in range(8):
                await client.generate([1, 2], max_tokens=2, timeout=60)
        assert first.p.num_prefills > 0
        assert second.p.num_prefills > 0
        async with Client(target, ca=authority.cert, server_name="else.example.org") as client:
            with pytest.raises(Unavailable, match="Hostname Verification"):
                await client.generate([1, 2], max_tokens=2, timeout=60)
