"""KV that keeps arriving at a decode worker: `python -m pdserve.bench.arriving_kv SETTINGS`.

Orders on stdin and answers on stdout are JSON, one line each; it ends when stdin closes. The first line on
stdin is the cluster's secret. To the worker it is
a router and a prefill worker in one: it reserves blocks, pushes KV into them by the real sender, and takes it
back at the time of the next hand-over. So nothing of it ever decodes: what the worker feels is the arriving.
It stands for prefill workers with cores of their own, and gives way to whatever else wants the one it has.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import grpc
import numpy as np

from kv_transfer.layout import KVLayout
from kv_transfer.send_queue import SenderConfig
from kv_transfer.sender import Sender
from kv_transfer.transfer import PushTarget
from pdserve.bench.child import told_trust
from pdserve.bench.transfer_ends import plain_blocks, sending_transport
from pdserve.v1 import cluster_pb2, generation_pb2, worker_pb2, worker_pb2_grpc
from pdserve.v1.errors import Cancelled
from trust.channels import open_channel
from trust.trust import Trust
from worker.messages import push_target

_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True)
class Settings:
    worker: str  # host:port
    transport: str
    num_tokens: int  # of each hand-over

    def dump(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Order:
    bytes_s: float
    seconds: float

    def dump(self) -> str:
        return json.dumps(asdict(self))


class _Arriving:
    def __init__(self, settings: Settings, trust: Trust) -> None:
        self._channel = open_channel(settings.worker, trust)
        self._worker = worker_pb2_grpc.DecodeWorkerStub(self._channel)
        describe = worker_pb2_grpc.WorkerStub(self._channel).Describe
        status = describe(worker_pb2.DescribeRequest(), timeout=_LIMIT_S, wait_for_ready=True).status
        self._layout = _layout(status.limits.layout)
        self._rng = random.Random(0)
        self._router_id = f"bench-{uuid.uuid4().hex}"
        self._num_tokens = settings.num_tokens
        self._block_ids = tuple(range(self._layout.num_blocks_for(settings.num_tokens)))
        blocks = plain_blocks(len(self._block_ids), self._layout)
        blocks.array[:] = np.random.default_rng(0).integers(0, 256, blocks.array.shape, np.uint8)
        transports = {settings.transport: sending_transport(settings.transport, trust, blocks)}
        self._sender = Sender(self._layout, blocks, transports, SenderConfig())
        self._steps = self._worker.Subscribe(worker_pb2.SubscribeRequest(router_id=self._router_id))
        self._is_subscribed = threading.Event()
        self._reader = threading.Thread(target=self._read, name="steps", daemon=True)
        self._reader.start()
        if not self._is_subscribed.wait(_LIMIT_S):
            raise TimeoutError("the worker's stream of steps does not begin")

    def press(self, order: Order) -> float:
        """Bytes that the worker acknowledged, a second."""
        interval_s = len(self._block_ids) * self._layout.block_bytes / order.bytes_s
        began = due = time.monotonic()
        num_bytes = 0
        target = self._reserve()
        while (due := due + interval_s) < began + order.seconds:
            transfer = self._sender.open(target)
            transfer.offer(self._block_ids, len(self._block_ids))
            target = self._reserve()  # the next one's, which may wait for a step to end
            time.sleep(max(0.0, due - time.monotonic()))
            num_bytes += transfer.bytes_acknowledged
            transfer.abort(Cancelled("the next one's time has come"))
            transfer.done.exception(_LIMIT_S)
        key = worker_pb2.SequenceKey(transfer_id=target.key.transfer_id, epoch=target.key.epoch)
        self._worker.Release(worker_pb2.ReleaseRequest(keys=[key]), timeout=_LIMIT_S)
        return num_bytes / (time.monotonic() - began)

    def _reserve(self) -> PushTarget:
        sequence = worker_pb2.SequenceSpec(
            transfer_id=uuid.uuid4().hex,
            epoch=1,
            prompt_token_ids=[self._rng.randrange(1000, 20000) for _ in range(self._num_tokens)],
            sampling=generation_pb2.SamplingParams(temperature=0.0, seed=0),
            stop=generation_pb2.StopConditions(max_tokens=2),
        )
        request = worker_pb2.ReserveRequest(
            sequence=sequence, router_id=self._router_id, mode=worker_pb2.ReserveRequest.MODE_RECEIVE_KV
        )
        return push_target(self._worker.Reserve(request, timeout=_LIMIT_S).reservation)

    def close(self) -> None:
        self._sender.close()
        self._steps.cancel()  # type: ignore[no-untyped-call]  # untyped in grpc-stubs
        self._reader.join()
        self._channel.close()

    def _read(self) -> None:
        try:
            for _ in self._steps:
                self._is_subscribed.set()
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.CANCELLED:
                raise


def _layout(message: cluster_pb2.KVLayout) -> KVLayout:
    return KVLayout(
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        block_size=message.block_size,
        dtype=message.dtype,
        model_fingerprint=message.model_fingerprint,
    )


def _serve(settings: Settings) -> Iterator[float]:
    arriving = _Arriving(settings, told_trust())
    yield 0.0
    for line in sys.stdin:
        yield arriving.press(Order(**json.loads(line)))
    arriving.close()


def _give_way() -> None:
    """Before there are threads, which inherit it."""
    if os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR):
        priority = os.sched_getparam(0).sched_priority
        os.sched_setparam(0, os.sched_param(max(1, priority - 1)))
    else:
        os.nice(5)


def main() -> None:
    _give_way()
    for bytes_s in _serve(Settings(**json.loads(sys.argv[1]))):
        sys.stdout.write(json.dumps(bytes_s) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
