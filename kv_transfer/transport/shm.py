"""P's side of shared memory: D's pool is mapped here, and the sending thread copies each frame's cells
straight into the blocks that are reserved for them. Only headers travel, over the Unix socket by which the
memory came.

That socket is between two processes of one kernel: nothing breaks it but one of them. P ends its side with a
farewell, once no thread of it copies any more; where none comes, D waits for the process to be dead.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Sequence

from kv_transfer.blocks import Cells
from kv_transfer.codec import FrameError, encode
from kv_transfer.frame import Header
from kv_transfer.frame_socket import FAREWELL, FrameSocket, framed
from kv_transfer.layout import KVLayout
from kv_transfer.peer_process import ForeignPeer, require_same_user
from kv_transfer.shared_pool import MappedPool, map_pool
from kv_transfer.transport.base import ConnectionEvents
from kv_transfer.verify import Verify
from kv_transfer.ways import Way, WaySilent, WayUnusable
from pdserve.v1.errors import PdserveError, Unavailable

# D's first word, which brings the descriptor: how many blocks lie there.
HELLO = struct.Struct("<I")
# For D's first word at most: it is on this host, and there are other ways.
_HELLO_S = 2.0
# How long `close` waits for a copy that is under way.
_COPY_S = 5.0


class ShmTransport:
    name = "shm"

    def __init__(
        self, layout: KVLayout, connect_timeout_s: float = 5.0, send_timeout_s: float = 10.0
    ) -> None:
        self._layout = layout
        self._connect_timeout_s = min(connect_timeout_s, _HELLO_S)
        self._send_timeout_s = send_timeout_s

    def connect(self, way: Way, events: ConnectionEvents) -> ShmConnection:
        if way.nonce is None:
            raise WayUnusable("the reservation names no nonce")
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            pool = self._open_pool(connected, way.address, way.nonce)
            return ShmConnection(FrameSocket(connected, self._send_timeout_s), pool, events)
        except BaseException:
            _leave(connected)
            raise

    def _open_pool(self, connected: socket.socket, path: str, nonce: bytes) -> MappedPool:
        connected.settimeout(self._connect_timeout_s)
        try:
            connected.connect(path)
            require_same_user(connected)
            hello, descriptors, _, _ = socket.recv_fds(connected, HELLO.size, 1)
        except (TimeoutError, BlockingIOError):  # the latter: too many wait already
            told = f"{path}: took no KV connection in {self._connect_timeout_s} s"
            raise WaySilent(told) from None
        except (OSError, ForeignPeer) as error:
            raise WayUnusable(f"{path}: {error}") from error
        try:
            if len(hello) != HELLO.size or len(descriptors) != 1:
                raise WayUnusable(f"{path} handed out no memory")
            (num_blocks,) = HELLO.unpack(hello)
            return map_pool(descriptors[0], num_blocks, self._layout, nonce)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def _leave(connected: socket.socket) -> None:
    """Nothing was written, and nothing will be: D, which may have handed out its memory, need not wait for
    this process to end."""
    try:
        connected.settimeout(0)
        connected.sendall(framed(FAREWELL))
    except OSError:
        pass  # nobody was there, or he is gone
    finally:
        connected.close()


class ShmConnection:
    is_remote_writer = True
    reads_until_answered = False
    usual_verify = Verify.OFF

    def __init__(self, frames: FrameSocket, pool: MappedPool, events: ConnectionEvents) -> None:
        self._frames = frames
        # None once it is closed. What is mapped stays in memory when its decode worker is gone, and this
        # object, one of a circle, until Python next looks for those: in hours, perhaps.
        self._pool: MappedPool | None = pool
        self._events = events
        self._is_closed = False
        # Held while something is copied or sent.
        self._sending = threading.Lock()
        self._closing = threading.Lock()
        self._reader = threading.Thread(target=self._read, name="kv-acks", daemon=True)
        self._reader.start()

    def send(self, header: Header, payload: Cells | None = None, target: Sequence[int] = ()) -> None:
        with self._sending:
            if self._is_closed:
                raise Unavailable("the connection is closed", reason="KV_STREAM_BROKEN")
            if payload is not None:
                self._copy(payload, target)
            try:
                self._frames.send(encode(header))
            except BlockingIOError:
                raise Unavailable("the peer takes nothing", reason="KV_SEND_TIMEOUT") from None
            except OSError as error:
                raise Unavailable(f"the KV stream broke: {error}", reason="KV_STREAM_BROKEN") from error

    def close(self) -> None:
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            self._say_farewell()
            self._pool = None
            self._frames.hang_up(both_ways=True)
            self._reader.join()
            self._frames.close()

    def _copy(self, payload: Cells, target: Sequence[int]) -> None:
        pool = self._pool
        if pool is None:
            raise Unavailable("the connection is closed", reason="KV_STREAM_BROKEN")
        if max(target) >= pool.num_blocks:
            raise Unavailable("the decode worker named blocks that it has not", reason="WRONG_BLOCKS")
        pool.write(target, payload)

    def _say_farewell(self) -> None:
        """Only where nothing is copied any more, and nothing is half sent."""
        if not self._sending.acquire(timeout=_COPY_S):
            return
        try:
            self._frames.send(FAREWELL)
        except OSError:
            pass  # D is gone, or takes nothing: then it must wait for this process to end
        finally:
            self._sending.release()

    def _read(self) -> None:
        error: PdserveError = Unavailable("the decode worker ended the stream", reason="KV_STREAM_BROKEN")
        try:
            while (reply := self._frames.receive()) is not None:
                self._events.on_reply(reply)
        except (FrameError, OSError) as broken:
            error = Unavailable(f"the KV stream broke: {broken}", reason="KV_STREAM_BROKEN")
        if not self._is_closed:
            self._events.on_lost(error)
