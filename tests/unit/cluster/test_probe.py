"""One worker's answer must not cost the others their questions: all are asked together."""

from __future__ import annotations

import grpc

from cluster.control.probe import Probe
from pdserve.v1.cluster_pb2 import WorkerStatus
from pdserve.v1.worker_pb2 import DescribeResponse
from tests.trusted import TRUST

ANSWERS = {
    b"\xff\xff\xff": None,
    DescribeResponse(status=WorkerStatus(id="decode-0")).SerializeToString(): "decode-0",
}


async def test_garbage_counts_as_no_answer() -> None:
    left = list(ANSWERS)

    async def describe(request: bytes, context: object) -> bytes:
        return left.pop(0)

    server = grpc.aio.server()
    handlers = {"Describe": grpc.unary_unary_rpc_method_handler(describe)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("pdserve.v1.Worker", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    probe = Probe(f"127.0.0.1:{port}", TRUST)
    for expected in ANSWERS.values():
        status = await probe.describe(timeout_s=10.0)
        assert (None if status is None else status.id) == expected
    await probe.close()
    await server.stop(None)
