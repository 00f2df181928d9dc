"""What carries KV, bare: the same number of bytes without blocks, frames, windows or checks.

`BareReceiver` is the parent's end and `BareSender` the child's; a send ends when the other end has said that
it has everything. Copying into shared memory has no other end.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import grpc
import numpy as np
import numpy.typing as npt
import torch

from kv_transfer.shared_pool import SharedPool
from kv_transfer.transport.pair import D_RANK, P_RANK, Arrival, GlooPair, Sent, join, listen

_HOST = "127.0.0.1"
_METHOD = "/pdserve.bench.Bare/Push"
_MESSAGE_BYTES = 2 * 2**20
_TIMEOUT_S = 60.0
_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]


class BareReceiver(Protocol):
    @property
    def port(self) -> int:
        """Where the sender connects to; 0 where it needs nobody."""
        ...

    def take(self, num_bytes: int, count: int) -> None:
        """Returns when all has come, where it is this thread that takes it."""
        ...

    def stop(self) -> None: ...


class BareSender(Protocol):
    def send(self, num_bytes: int) -> float:
        """Seconds."""
        ...

    def close(self) -> None: ...


class NoReceiver:
    port = 0

    def take(self, num_bytes: int, count: int) -> None: ...

    def stop(self) -> None: ...


class BareCopy:
    """From one process's memory into memory that others can map, by one thread."""

    def __init__(self, source: npt.NDArray[np.uint8]) -> None:
        self._source = source
        self._pool = SharedPool(len(source))
        self._target = self._pool.tensor.numpy()
        self._target[:] = source

    def send(self, num_bytes: int) -> float:
        began = time.perf_counter()
        self._target[:num_bytes] = self._source[:num_bytes]
        return time.perf_counter() - began

    def close(self) -> None: ...


class BareGlooReceiver:
    def __init__(self) -> None:
        self._store, self.port = listen(_HOST, _TIMEOUT_S)
        self._pair: GlooPair | None = None
        self._said: Sent | None = None

    def take(self, num_bytes: int, count: int) -> None:
        if self._pair is None:
            self._pair = GlooPair(self._store, D_RANK, _HOST, _TIMEOUT_S)
        buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        for _ in range(count):
            self._pair.receive([buffer]).wait(_TIMEOUT_S)
            self._said = self._pair.send([torch.zeros(1, dtype=torch.uint8)])

    def stop(self) -> None:
        self._said = None
        if self._pair is not None:
            self._pair.close()


class BareGloo:
    """One message, however large. The pair is made at the first of them: both ends do that together."""

    def __init__(self, source: npt.NDArray[np.uint8], port: int) -> None:
        self._source = torch.from_numpy(source)
        self._store = join(_HOST, port, _TIMEOUT_S)
        self._pair: GlooPair | None = None

    def send(self, num_bytes: int) -> float:
        if self._pair is None:
            self._pair = GlooPair(self._store, P_RANK, _HOST, _TIMEOUT_S)
        said = torch.zeros(1, dtype=torch.uint8)
        began = time.perf_counter()
        sent: Sent = self._pair.send([self._source[:num_bytes]])
        answer: Arrival = self._pair.receive([said])
        answer.wait(_TIMEOUT_S)
        seconds = time.perf_counter() - began
        del sent
        return seconds

    def close(self) -> None:
        if self._pair is not None:
            self._pair.close()


class BareGrpcReceiver:
    """Drops what comes; an empty message is answered."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="bare")
        self._server = grpc.server(self._threads, options=_OPTIONS)
        service, method = _METHOD[1:].split("/")
        handlers = {method: grpc.stream_stream_rpc_method_handler(_drop)}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        self.port = self._server.add_insecure_port(f"{_HOST}:0")
        self._server.start()

    def take(self, num_bytes: int, count: int) -> None: ...

    def stop(self) -> None:
        self._server.stop(grace=None).wait()
        self._threads.shutdown(wait=True)


def _drop(messages: Iterator[bytes], context: object) -> Iterator[bytes]:
    try:
        for message in messages:
            if not message:
                yield b"all"
    except grpc.RpcError:
        return  # the sender ended


class BareGrpc:
    """One stream, no (de)serializers, messages of the size that ours have; they are made before the clock."""

    def __init__(self, source: npt.NDArray[np.uint8], port: int) -> None:
        self._source = source
        self._messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(f"{_HOST}:{port}", options=_OPTIONS)
        endless: Iterator[bytes] = iter(self._messages.get, None)
        self._call = self._channel.stream_stream(_METHOD, None, None)(endless)

    def send(self, num_bytes: int) -> float:
        starts = range(0, num_bytes, _MESSAGE_BYTES)
        messages = [
            self._source[start : min(num_bytes, start + _MESSAGE_BYTES)].tobytes() for start in starts
        ]
        began = time.perf_counter()
        for message in (*messages, b""):
            self._messages.put(message)
        next(iter(self._call))
        return time.perf_counter() - began

    def close(self) -> None:
        self._call.cancel()  # type: ignore[no-untyped-call]  # untyped in grpc-stubs
        self._channel.close()


# By transport: what it is compared with.
RECEIVERS: dict[str, Callable[[], BareReceiver]] = {
    "shm": NoReceiver,
    "collective": BareGlooReceiver,
    "grpc": BareGrpcReceiver,
}


def bare_sender(transport: str, source: npt.NDArray[np.uint8], port: int) -> BareSender:
    """`source`: flat, what is sent is its beginning."""
    if transport == "shm":
        return BareCopy(source)
    return BareGloo(source, port) if transport == "collective" else BareGrpc(source, port)
