"""Router, controller and workers speak mutual TLS where certificates are configured, KV included."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from decode_worker.worker import DecodeWorker
from engine.config import ModelConfig
from engine.loading import LoadedModel, load_model
from pdserve.v1 import worker_pb2, worker_pb2_grpc
from tests.models import tiny_model
from tests.serving import Serving, TransportName, serving
from tests.trusted import TRUST_FILES
from tests.unit.trust.certificates import PartsAuthority
from trust.channels import open_aio_channel
from trust.trust import Trust, TrustFiles
from worker.identity import Role


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(ModelConfig(id=str(folder), device="cpu"))


@pytest.fixture
def authority(tmp_path: Path) -> PartsAuthority:
    return PartsAuthority(tmp_path)


@pytest.fixture
def trust(authority: PartsAuthority) -> TrustFiles:
    return TrustFiles(secret=TRUST_FILES.secret, tls=authority.files("part"))


@pytest.fixture
async def served(folder: Path, loaded: LoadedModel, trust: TrustFiles) -> AsyncIterator[Serving]:
    async with serving(folder, loaded, trust=trust) as made:
        yield made


@pytest.mark.parametrize("transport", ["grpc", "collective", "auto"])
async def test_requests_are_served_by_parts_that_speak_tls_alone(
    folder: Path, loaded: LoadedModel, trust: TrustFiles, transport: TransportName
) -> None:
    async with serving(folder, loaded, trust=trust, transport=transport) as served:
        result = await served.client.generate([5] * 40, max_tokens=6, temperature=0, ignore_eos=True)
        assert len(result.token_ids) == 6
        addresses = [worker.address for worker in served.workers]
        for worker in served.of(Role.DECODE):
            assert isinstance(worker, DecodeWorker)
            assert worker._endpoint is not None
            addresses += [way.address for way in worker._endpoint.ways if way.transport != "shm"]
        assert len(addresses) > 2
        for address in addresses:
            assert not await _understands_plain_words(address)


async def test_a_part_without_a_certificate_of_the_authority_is_not_heard(
    served: Serving, authority: PartsAuthority, trust: TrustFiles, tmp_path: Path
) -> None:
    other = PartsAuthority(tmp_path, "other-ca")
    theirs = other.files("theirs").model_copy(update={"ca": authority.cert})
    for worker in served.workers:
        for stranger in (Trust(trust.read().secret), Trust(trust.read().secret, theirs)):
            assert await _describe(worker.address, stranger) is grpc.StatusCode.UNAVAILABLE
        assert await _describe(worker.address, trust.read()) is grpc.StatusCode.OK


async def test_a_certificate_alone_is_not_enough(served: Serving, trust: TrustFiles) -> None:
    own = Trust(Trust.fresh().secret, trust.tls)
    for worker in served.workers:
        assert await _describe(worker.address, own) is grpc.StatusCode.UNAUTHENTICATED


async def test_a_server_for_another_name_is_not_spoken_to(
    served: Serving, authority: PartsAuthority, trust: TrustFiles
) -> None:
    files = authority.files("wary").model_copy(update={"name": "another-cluster"})
    wary = Trust(trust.read().secret, files)
    assert await _describe(served.workers[0].address, wary) is grpc.StatusCode.UNAVAILABLE
    assert {each.identity.role for each in served.workers} == {Role.PREFILL, Role.DECODE}


async def _describe(address: str, trust: Trust) -> grpc.StatusCode:
    async with open_aio_channel(address, trust) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        try:
            await stub.Describe(worker_pb2.DescribeRequest(), timeout=20)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def _understands_plain_words(address: str) -> bool:
    """A TLS server closes on HTTP/2 in the clear, and shakes hands with whoever speaks TLS."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000"))
    said = await asyncio.wait_for(reader.read(64), 20)
    writer.close()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port), ssl=context), 20)
    writer.close()
    # A frame of HTTP/2's settings begins with three bytes of length and the type 4.
    return said[3:4] == b"\x04"
