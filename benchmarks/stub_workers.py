"""Workers that compute nothing and cost little: what a router's own time is measured against.

A prefill worker that answers at once, a decode worker that gives every sequence a token each step, all in
one message as an engine does, and a controller that shows the two. `python -m benchmarks.stub_workers
--step-ms 40` prints {"control": "host:port"} and serves until its stdin closes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator

import grpc

from pdserve.v1 import cluster_pb2, cluster_pb2_grpc, generation_pb2, worker_pb2, worker_pb2_grpc

TOKEN_ID = 65
DECODE_INSTANCE = "stub-decode"

Key = tuple[str, int]


class StubDecode(worker_pb2_grpc.DecodeWorkerServicer):
    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._reserved: dict[Key, worker_pb2.SequenceSpec] = {}
        # Each with its latest token, which changes from step to step, and its last position.
        self._running: dict[Key, tuple[worker_pb2.TokenOutput, int]] = {}

    def begin(self, key: Key) -> None:
        """Its prompt was computed: it goes on behind the first token."""
        spec = self._reserved.pop(key, None)
        if spec is not None:
            token = worker_pb2.TokenOutput(transfer_id=key[0], epoch=key[1], token_id=TOKEN_ID)
            self._running[key] = (token, spec.stop.max_tokens - 1)

    async def Reserve(
        self, request: worker_pb2.ReserveRequest, context: object
    ) -> worker_pb2.ReserveResponse:
        spec = request.sequence
        self._reserved[spec.transfer_id, spec.epoch] = spec
        reservation = worker_pb2.Reservation(
            transfer_id=spec.transfer_id, epoch=spec.epoch, instance_id=DECODE_INSTANCE, lease_ms=60_000
        )
        return worker_pb2.ReserveResponse(reservation=reservation)

    async def Release(
        self, request: worker_pb2.ReleaseRequest, context: object
    ) -> worker_pb2.ReleaseResponse:
        for key in request.keys:
            self._running.pop((key.transfer_id, key.epoch), None)
            self._reserved.pop((key.transfer_id, key.epoch), None)
        return worker_pb2.ReleaseResponse()

    async def Subscribe(
        self, request: worker_pb2.SubscribeRequest, context: object
    ) -> AsyncIterator[worker_pb2.StepOutput]:
        """A step that comes late is not made up for."""
        clock = asyncio.get_running_loop().time
        due = clock()
        yield worker_pb2.StepOutput()
        while True:
            due = max(due + self._step_s, clock())
            await asyncio.sleep(due - clock())
            if self._running:
                yield self._step()

    def _step(self) -> worker_pb2.StepOutput:
        step = worker_pb2.StepOutput()
        for key, (token, last) in list(self._running.items()):
            token.position += 1
            if token.position == last:
                token.finish_reason = generation_pb2.FINISH_REASON_LENGTH
                del self._running[key]
            step.tokens.append(token)
        return step


class StubPrefill(worker_pb2_grpc.PrefillWorkerServicer):
    def __init__(self, decode: StubDecode) -> None:
        self._decode = decode

    async def Prefill(
        self, request: worker_pb2.PrefillRequest, context: object
    ) -> AsyncIterator[worker_pb2.PrefillResponse]:
        spec = request.sequence
        report = worker_pb2.PrefillReport()
        token = worker_pb2.TokenOutput(
            transfer_id=spec.transfer_id, epoch=spec.epoch, token_id=TOKEN_ID, prefill=report
        )
        if spec.stop.max_tokens == 1:
            token.finish_reason = generation_pb2.FINISH_REASON_LENGTH
        yield worker_pb2.PrefillResponse(first_token=worker_pb2.FirstToken(token=token))
        if spec.stop.max_tokens > 1:
            self._decode.begin((spec.transfer_id, spec.epoch))
            yield worker_pb2.PrefillResponse(transfer_end=worker_pb2.TransferEnd())


class StubControl(cluster_pb2_grpc.ControlServicer):
    def __init__(self, pools: list[cluster_pb2.PoolStatus]) -> None:
        self._snapshot = cluster_pb2.ClusterSnapshot(name="stub", version=1, model="stub", pools=pools)

    async def Watch(
        self, request: cluster_pb2.WatchRequest, context: object
    ) -> AsyncIterator[cluster_pb2.ClusterSnapshot]:
        yield self._snapshot
        await asyncio.Event().wait()


def pool_of(role: cluster_pb2.Role, name: str, address: str) -> cluster_pb2.PoolStatus:
    limits = cluster_pb2.WorkerLimits(
        max_model_len=1 << 20,
        block_size=16,
        max_num_seqs=4096,
        kv_blocks_total=1 << 20,
        max_sequence_tokens=1 << 20,
    )
    worker = cluster_pb2.WorkerStatus(
        id=name,
        instance_id=name,
        role=role,
        state=cluster_pb2.WORKER_STATE_READY,
        address=address,
        limits=limits,
    )
    return cluster_pb2.PoolStatus(role=role, target=1, workers=[worker])


async def serve(step_s: float) -> None:
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    decode = StubDecode(step_s)
    worker_pb2_grpc.add_DecodeWorkerServicer_to_server(decode, server)
    worker_pb2_grpc.add_PrefillWorkerServicer_to_server(StubPrefill(decode), server)
    pools = [
        pool_of(cluster_pb2.ROLE_PREFILL, "stub-prefill", address),
        pool_of(cluster_pb2.ROLE_DECODE, DECODE_INSTANCE, address),
    ]
    cluster_pb2_grpc.add_ControlServicer_to_server(StubControl(pools), server)
    await server.start()
    sys.stdout.write(json.dumps({"control": address}) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-ms", type=float, default=40.0)
    asyncio.run(serve(parser.parse_args().step_ms / 1000))
