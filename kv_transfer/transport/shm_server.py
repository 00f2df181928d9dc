"""D's side of shared memory: hands its pool to prefill workers of the same user on this host, takes the
headers of what they write into it, and knows when one of them can write no more."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time

from kv_transfer.codec import FrameError
from kv_transfer.frame_socket import FAREWELL, FrameSocket
from kv_transfer.peer_process import ForeignPeer, PeerProcess, peer_process
from kv_transfer.shared_pool import SharedPool
from kv_transfer.socket_folder import SocketFolder, remove_left_overs
from kv_transfer.transport.base import FrameSink, InboundStream
from kv_transfer.transport.shm import HELLO, ShmTransport
from kv_transfer.ways import Way

_SEND_TIMEOUT_S = 10.0
# After an `accept` that failed: what it lacked (descriptors, memory) does not come back at once.
_PAUSE_MS = 200
# Between a killed process's last socket and its end.
_DEATH_MS = 1000
log = logging.getLogger(__name__)


class ShmPushServer:
    """A thread that accepts, and one for each prefill worker that is connected."""

    def __init__(
        self,
        sink: FrameSink,
        pool: SharedPool,
        num_blocks: int,
        max_streams: int = 128,
        stop_grace_s: float = 2.0,
    ) -> None:
        """Raises OSError where this machine has not what it takes."""
        os.close(os.pidfd_open(os.getpid()))
        self._sink = sink
        self._pool = pool
        self._num_blocks = num_blocks
        self._max_streams = max_streams
        self._stop_grace_s = stop_grace_s
        self._streams: set[_Inbound] = set()
        self._lock = threading.Lock()
        num_removed = remove_left_overs()
        if num_removed:
            log.info("removed the sockets of %d workers that were killed", num_removed)
        self._folder = SocketFolder()
        self._path = str(self._folder.path / "pool")
        # Readable once `stop` was called, and ever after.
        self._stopping = os.eventfd(0)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self._path)
        os.chmod(self._path, 0o600)
        self._thread = threading.Thread(target=self._accept_all, name="kv-shm", daemon=True)

    @property
    def ways(self) -> tuple[Way, ...]:
        return (Way(ShmTransport.name, self._path, self._pool.nonce),)

    def start(self) -> None:
        self._listener.listen(self._max_streams)
        self._thread.start()

    def stop(self) -> None:
        """A sender that gives no proof in time that it writes no more is watched on, in the background: what
        it may write stays in quarantine."""
        os.eventfd_write(self._stopping, 1)
        if self._thread.ident is not None:
            self._thread.join()
        self._listener.close()
        self._folder.remove()
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.hang_up()
            stream.has_left.wait()
        deadline = time.monotonic() + self._stop_grace_s
        for stream in streams:
            stream.join(max(0.0, deadline - time.monotonic()))
        os.close(self._stopping)

    def _accept_all(self) -> None:
        """Until `stop`, whatever fails meanwhile."""
        calls, stop = select.poll(), select.poll()
        calls.register(self._listener, select.POLLIN)
        for poll in (calls, stop):
            poll.register(self._stopping, select.POLLIN)
        is_failing = False
        while self._stopping not in dict(calls.poll()):
            try:
                connected, _ = self._listener.accept()
            except OSError as error:
                if not is_failing:
                    log.error("no KV connection can be taken by shm for now: %s", error)
                is_failing = True
                stop.poll(_PAUSE_MS)
                continue
            is_failing = False
            try:
                self._welcome(connected)
            except (ForeignPeer, OSError, RuntimeError) as error:  # the last: no thread to be had
                log.warning("a process that asked for the pool's memory got none: %s", error)
                connected.close()

    def _welcome(self, connected: socket.socket) -> None:
        with self._lock:
            if len(self._streams) >= self._max_streams:
                raise ForeignPeer(f"{len(self._streams)} are connected")
        process = peer_process(connected)
        try:
            self._hand_over_to(process, connected)
        except BaseException:
            process.close()
            raise

    def _hand_over_to(self, process: PeerProcess, connected: socket.socket) -> None:
        stream = _Inbound(FrameSocket(connected, _SEND_TIMEOUT_S), process, self._sink, self._stopping, self)
        # Only now, with the process in sight: from here on it can write.
        socket.send_fds(connected, [HELLO.pack(self._num_blocks)], [self._pool.descriptor])
        with self._lock:
            self._streams.add(stream)
        try:
            stream.start()
        except RuntimeError:  # nobody will tell it which blocks are reserved: it has none to write
            self.forget(stream)
            raise

    def forget(self, stream: _Inbound) -> None:
        with self._lock:
            self._streams.discard(stream)


class _Inbound(threading.Thread):
    """One prefill process's stream. It ends with the farewell, an error, the process or `stop`; the thread
    ends when the process can write no more."""

    def __init__(
        self,
        frames: FrameSocket,
        process: PeerProcess,
        sink: FrameSink,
        stopping: int,
        server: ShmPushServer,
    ) -> None:
        super().__init__(name=f"kv-from-{process.pid}", daemon=True)
        # No frame is accepted any more.
        self.has_left = threading.Event()
        self._frames = frames
        self._process = process
        self._sink = sink
        self._server = server
        self._stream = InboundStream(
            f"pid {process.pid}", ShmTransport.name, is_remote_writer=True, sender_pid=process.pid
        )
        self._can_write = True
        self._stopping = stopping
        self._poll = select.poll()
        for descriptor in (frames.fileno(), process.pidfd, stopping):
            self._poll.register(descriptor, select.POLLIN)

    def run(self) -> None:
        log.info("KV comes by shm from pid=%d", self._process.pid)
        try:
            while raw := self._next():
                reply = self._sink.accept(self._stream, raw)
                if reply is not None:
                    self._frames.send(reply)
        except (FrameError, OSError) as error:
            log.warning("the KV stream of pid=%d ends: %s", self._process.pid, error)
        except Exception:  # a bug: in the log at once, while this thread still has to watch the process
            log.exception("the KV stream of pid=%d broke", self._process.pid)
        self._leave()

    def _leave(self) -> None:
        self._poll.unregister(self._stopping)
        self.hang_up()
        self._sink.disconnect(self._stream)
        self.has_left.set()
        self._wait_for_proof()
        self._sink.peer_gone(self._stream)
        self._server.forget(self)
        self._frames.close()
        self._process.close()

    def hang_up(self) -> None:
        """The sender hears that nothing is answered any more, and says farewell."""
        self._frames.hang_up()

    def _next(self) -> bytes | None:
        """The next frame; none, or an empty one, at the end."""
        while (message := self._frames.take()) is None:
            ready = dict(self._poll.poll())
            if self._stopping in ready:
                return None
            if self._frames.fileno() in ready:
                if not self._frames.fill():
                    return None
            elif self._process.pidfd in ready:
                self._can_write = False
                return None
        if message == FAREWELL:
            self._can_write = False
        return message

    def _wait_for_proof(self) -> None:
        """A broken stream is none. What else comes is read only for the farewell behind it."""
        try:
            while self._can_write and self._next() is not None:
                pass
        except (FrameError, OSError):
            pass  # nothing can be read here any more
        if self._can_write:
            self._poll.unregister(self._frames.fileno())
            if not self._poll.poll(_DEATH_MS):
                log.warning("pid=%d may still write its blocks: they wait for its end", self._process.pid)
                self._poll.poll()
