"""A worker, or whoever has its port now, answers with bytes that are no message: that is its loss, and the
router and its other streams live on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from router.fleet.worker_info import Role
from tests.integration.router.harness import Cluster, running, until
from tests.scripted_workers import ScriptedDecode, ScriptedPrefill, ScriptedWorker, expected

GARBAGE = b"\xff\xff\xff"


class Garbled:
    """One method of a worker's service, which says nothing but garbage."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.num_calls = 0

    def serve(self, server: grpc.aio.Server) -> None:
        """In place of the handler that is there."""
        service, name = self.method.split("/")
        is_stream = name != "Reserve"
        make = grpc.unary_stream_rpc_method_handler if is_stream else grpc.unary_unary_rpc_method_handler
        handler = make(self._stream if is_stream else self._answer)
        server.add_registered_method_handlers(service, {name: handler})

    async def _answer(self, request: bytes, context: object) -> bytes:
        self.num_calls += 1
        return GARBAGE

    async def _stream(self, request: bytes, context: object) -> AsyncIterator[bytes]:
        self.num_calls += 1
        yield GARBAGE
        await asyncio.Event().wait()  # it ends nothing by itself


class GarbledDecode(ScriptedDecode):
    def __init__(self, garbled: Garbled) -> None:
        super().__init__("decode-garbled")
        self._garbled = garbled

    def services(self, server: grpc.aio.Server) -> None:
        super().services(server)
        self._garbled.serve(server)


class GarbledPrefill(ScriptedPrefill):
    def __init__(self, garbled: Garbled) -> None:
        super().__init__("prefill-garbled", {})
        self._garbled = garbled

    def services(self, server: grpc.aio.Server) -> None:
        super().services(server)
        self._garbled.serve(server)


def _joining(cluster: Cluster, garbled: Garbled) -> ScriptedWorker:
    if "Prefill" in garbled.method:
        prefill = GarbledPrefill(garbled)
        cluster.prefills.append(prefill)
        return prefill
    decode = GarbledDecode(garbled)
    cluster.decodes.append(decode)
    cluster.p._decodes[decode.instance_id] = decode
    return decode


@pytest.mark.parametrize(
    "method", ["DecodeWorker/Subscribe", "DecodeWorker/Reserve", "PrefillWorker/Prefill"]
)
async def test_garbage_is_the_loss_of_who_sends_it(model_dir: Path, method: str) -> None:
    garbled = Garbled(f"pdserve.v1.{method}")
    async with running(model_dir) as cluster:
        worker = _joining(cluster, garbled)
        await worker.start()
        await cluster.show()
        if method != "DecodeWorker/Subscribe":  # it is no candidate before it has spoken
            role = Role(worker.role)
            await until(lambda: len(cluster.router.table.usable(role)) == 2)
        number = 0
        while garbled.num_calls < 3:
            answer = await asyncio.wait_for(cluster.client.generate([number], max_tokens=5, seed=1), 30)
            assert answer.token_ids == expected([number], 1, 5)
            number += 1
        assert cluster.router.tasks.failure is None
        cluster.prefills[:], cluster.decodes[:] = cluster.prefills[:1], cluster.decodes[:1]
        await worker.stop()
