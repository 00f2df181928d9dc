"""Frames as the messages of one bidirectional gRPC stream, `/pdserve.v1.KVTransfer/Push`.

The sync API, on threads of its own: the asyncio loop that streams tokens never carries KV. Both ends
register the method raw (no serializer), so that gRPC hands over the very bytes of a frame.

A transport that carries payloads by itself can let its frames ride here: as a stream of another kind, by a
method of its own on the same server.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import grpc

from kv_transfer.blocks import Cells
from kv_transfer.codec import FrameError, encode, max_message_bytes
from kv_transfer.frame import Header
from kv_transfer.heap import keep_freed_memory
from kv_transfer.transport.answers import Answers
from kv_transfer.transport.base import ConnectionEvents, FrameSink, InboundStream
from kv_transfer.transport.outgoing import Outgoing
from kv_transfer.transport.stream_watch import StreamLimits, StreamWatch
from kv_transfer.verify import Verify
from kv_transfer.ways import Way
from pdserve.v1.errors import PdserveError, Unavailable, from_rpc_error
from trust.channels import open_channel
from trust.servers import listen, make_server
from trust.trust import Trust

SERVICE = "pdserve.v1.KVTransfer"
_PUSH = "Push"
PUSH = f"/{SERVICE}/{_PUSH}"
_KEEPALIVE_MS = 10_000
_KEEPALIVE_TIMEOUT_MS = 5_000
# A server ends a client that pings more often than this.
_MIN_PING_MS = 5_000
log = logging.getLogger(__name__)

ChannelOptions = list[tuple[str, str | int]]


def _options(block_bytes: int) -> ChannelOptions:
    limit = max_message_bytes(block_bytes)
    return [
        ("grpc.max_send_message_length", limit),
        ("grpc.max_receive_message_length", limit),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_MS),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


class GrpcTransport:
    """P's side. Both sides know the largest message from the size of a block."""

    name = "grpc"

    def __init__(
        self, trust: Trust, block_bytes: int, connect_timeout_s: float = 5.0, send_timeout_s: float = 10.0
    ) -> None:
        self._trust = trust
        # A connection of its own, not one shared with the control plane of the same process.
        self._options = [*_options(block_bytes), ("grpc.use_local_subchannel_pool", 1)]
        self._connect_timeout_s = connect_timeout_s
        self._send_timeout_s = send_timeout_s

    def connect(self, way: Way, events: ConnectionEvents) -> GrpcConnection:
        return self.open(way.address, _PUSH, events)

    def open(self, address: str, method: str, events: ConnectionEvents) -> GrpcConnection:
        """A stream of any kind. Raises Unavailable where nobody answers in time."""
        channel = open_channel(address, self._trust, self._options)
        try:
            grpc.channel_ready_future(channel).result(timeout=self._connect_timeout_s)
        except grpc.FutureTimeoutError:
            channel.close()
            waited = f"{self._connect_timeout_s} s"
            raise Unavailable(f"{address} took no KV connection in {waited}", reason="KV_CONNECT") from None
        return GrpcConnection(channel, method, events, self._send_timeout_s)


class GrpcConnection:
    is_remote_writer = False
    reads_until_answered = False
    usual_verify = Verify.CHECKSUM

    def __init__(
        self, channel: grpc.Channel, method: str, events: ConnectionEvents, send_timeout_s: float
    ) -> None:
        self._channel = channel
        self._events = events
        self._outgoing = Outgoing(send_timeout_s)
        self._call = channel.stream_stream(f"/{SERVICE}/{method}", None, None)(iter(self._outgoing))
        self._reader = threading.Thread(target=self._read, name="kv-acks", daemon=True)
        self._reader.start()

    def send(self, header: Header, payload: Cells | None = None, target: Sequence[int] = ()) -> None:
        self.put(encode(header, () if payload is None else payload.pieces))

    def put(self, message: bytes) -> None:
        self._outgoing.put(message)

    def close(self) -> None:
        self._outgoing.close()
        self._call.cancel()  # type: ignore[no-untyped-call]  # untyped in grpc-stubs
        if threading.current_thread() is not self._reader:
            self._reader.join()
        self._channel.close()

    def _read(self) -> None:
        error: PdserveError = Unavailable("the decode worker ended the stream", reason="KV_STREAM_BROKEN")
        try:
            for reply in self._call:
                self._events.on_reply(reply)
        except grpc.RpcError as broken:
            error = from_rpc_error(broken)
        if self._outgoing.close():
            lost = f"the KV stream broke: {error.message}"
            self._events.on_lost(Unavailable(lost, reason="KV_STREAM_BROKEN"))


class StreamKind(Protocol):
    """D's side of streams that come by a method of their own."""

    @property
    def transport(self) -> str: ...

    @property
    def method(self) -> str: ...

    def serve(self, messages: Iterator[bytes], peer: str) -> Iterator[bytes]:
        """What to answer, on a thread for each stream. Ends when `messages` does; raises FrameError, too."""
        ...

    def stop(self) -> None:
        """After the last stream has ended."""
        ...


class GrpcPushServer:
    """D's side: two threads for each prefill worker that is connected. The ways of `kinds` come first."""

    def __init__(
        self,
        sink: FrameSink,
        trust: Trust,
        host: str,
        port: int,
        block_bytes: int,
        limits: StreamLimits | None = None,
        kinds: Sequence[StreamKind] = (),
    ) -> None:
        limits = limits or StreamLimits()
        self._sink = sink
        self._host = host
        self._kinds = kinds
        self._threads = ThreadPoolExecutor(limits.max_streams, thread_name_prefix="kv-push")
        options = [*_options(block_bytes), ("grpc.so_reuseport", 0)]
        self._server = make_server(self._threads, trust, options, limits.max_streams)
        self._watch = StreamWatch(limits)
        methods = {_PUSH: self._push} | {kind.method: kind.serve for kind in kinds}
        handlers = {method: _handler(serve, self._watch) for method, serve in methods.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        # Raises RuntimeError, which names the address, where the port is taken.
        self.port = listen(self._server, f"{host}:{port}", trust)

    @property
    def address(self) -> str:
        return f"{self._host}:{self.port}"

    @property
    def ways(self) -> tuple[Way, ...]:
        names = [*(kind.transport for kind in self._kinds), GrpcTransport.name]
        return tuple(Way(name, self.address) for name in names)

    def start(self) -> None:
        keep_freed_memory()
        self._server.start()
        self._watch.start()

    def stop(self) -> None:
        """Ends the streams and returns when their threads have left."""
        self._watch.stop()
        self._server.stop(grace=None).wait()
        self._threads.shutdown(wait=True)
        for kind in self._kinds:
            kind.stop()

    def _push(self, frames: Iterator[bytes], peer: str) -> Iterator[bytes]:
        """Frames are applied on a thread of their own: none of them waits until an answer has left."""
        answers = Answers()
        taking = threading.Thread(target=self._take, args=(frames, peer, answers), name="kv-in", daemon=True)
        taking.start()
        try:
            yield from answers
        finally:
            taking.join()  # where answers can no longer leave, no frame comes either

    def _take(self, frames: Iterator[bytes], peer: str, answers: Answers) -> None:
        stream = InboundStream(peer, GrpcTransport.name)
        ended_by: Exception | None = None
        try:
            for raw in frames:
                answer = self._sink.accept(stream, raw)
                if answer is not None:
                    answers.put(answer, len(raw))
        except FrameError as error:
            log.warning("the KV stream of %s ends: %s", peer, error)
            ended_by = error
        except grpc.RpcError as error:
            ended_by = error
        finally:
            self._sink.disconnect(stream)
            answers.close(ended_by)


def _handler(
    serve: Callable[[Iterator[bytes], str], Iterator[bytes]], watch: StreamWatch
) -> grpc.RpcMethodHandler[bytes, bytes]:
    def push(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            with watch.watching(messages, context.peer(), context.cancel) as stream:
                yield from stream.pass_on(serve(iter(stream), stream.peer))
        except FrameError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except grpc.RpcError as error:  # the caller went away
            log.info("push stream from=%s ended: %s", context.peer(), error)

    return grpc.stream_stream_rpc_method_handler(push)
