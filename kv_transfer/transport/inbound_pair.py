"""One prefill worker's announcements and payloads, on D.

Three threads share the work, none of which may wait for what another one waits for: this one reads what is
announced and posts receives; the second waits for payloads and accepts frames; the third, gRPC's, sends the
answers of both. The first outlives the others and gives everything back.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import grpc
import torch

from kv_transfer.blocks import BlockStore, host_bytes
from kv_transfer.codec import FrameError, decode
from kv_transfer.frame import MAX_APART_BYTES, Blocks
from kv_transfer.transport.answers import MAX_UNREAD, require_read
from kv_transfer.transport.base import FrameSink, InboundStream, Landing
from kv_transfer.transport.pair import D_RANK, STRAIGHT_BYTES, Arrival, Pair, PairBroken, listen
from kv_transfer.transport.pair_messages import (
    NONCE_BYTES,
    NUM_POSTED,
    Kind,
    Meeting,
    message,
    pack_posted,
    parse,
    parse_hello,
)
from kv_transfer.transport.pairing import device_of, hello_of, make_pair

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PairTimeouts:
    # Until both ends have made their part of the pair.
    pair_s: float = 5.0
    # From when a payload is next to come until it is there: less than P waits for an answer.
    data_s: float = 5.0


@dataclass(frozen=True, slots=True)
class _Payload:
    """On its way to a landing: in place, piece by piece as its `neighbours` are; or into a buffer."""

    landing: Landing
    arrival: Arrival
    num_bytes: int
    neighbours: Sequence[int] = ()
    buffer: torch.Tensor | None = None


class InboundPair(threading.Thread):
    """The thread that reads and posts; it ends when the stream has ended."""

    def __init__(
        self,
        messages: Iterator[bytes],
        stream: InboundStream,
        sink: FrameSink,
        blocks: BlockStore,
        host: str,
        timeouts: PairTimeouts,
    ) -> None:
        super().__init__(name="kv-announced", daemon=True)
        self._messages = messages
        self._stream = stream
        self._sink = sink
        self._blocks = blocks
        self._host = host
        self._timeouts = timeouts
        self._device = device_of(blocks)
        self._pair: Pair | None = None
        self._answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._error: FrameError | None = None
        # Posted payloads, and the frames that wait behind them; at the end None.
        self._due: queue.SimpleQueue[_Payload | bytes | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(NUM_POSTED)
        self._buffers: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        self._taker = threading.Thread(target=self._take_all, name="kv-arrived", daemon=True)
        self._has_taker_left = False

    def answers(self) -> Iterator[bytes]:
        """On gRPC's thread. Raises FrameError."""
        while (answer := self._answers.get()) is not None:
            yield answer
        if self._error is not None:
            raise self._error

    def _say(self, answer: bytes) -> None:
        require_read(self._answers.qsize())
        self._answers.put(answer)

    def run(self) -> None:
        try:
            self._read_all()
        except PairBroken as error:
            self._give_up(error)
        except FrameError as error:
            self._error = error
        except grpc.RpcError as error:
            log.info("the stream from=%s ended: %s", self._stream.peer, error)
        finally:
            self._finish()

    # -- reading and posting -----------------------------------------------------------------------

    def _read_all(self) -> None:
        for raw in self._messages:
            if self._pair is None:
                self._pair_up(raw)
                self._taker.start()
            else:
                if self._due.qsize() >= MAX_UNREAD:
                    raise FrameError(f"{MAX_UNREAD} frames came before a payload did")
                self._due.put(self._announced(self._pair, raw))

    def _pair_up(self, raw: bytes) -> None:
        kind, body = parse(raw)
        if kind is not Kind.PAIR:
            raise FrameError(f"{kind.name} came before a pair was made")
        theirs, ours = parse_hello(body), hello_of(self._blocks)
        if theirs != ours:
            raise PairBroken(f"{theirs} there, {ours} here")
        store, port = listen(self._host, self._timeouts.pair_s)
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._say(message(Kind.MEET, Meeting(port, nonce).pack()))
        self._pair = make_pair(self._blocks, store, D_RANK, self._host, self._timeouts.pair_s)
        came = torch.empty(NONCE_BYTES, dtype=torch.uint8, device=self._device)
        self._pair.receive([came]).wait(self._timeouts.pair_s)
        if host_bytes(came) != nonce:
            raise PairBroken("somebody else came")
        self._say(message(Kind.PAIRED))

    def _announced(self, pair: Pair, raw: bytes) -> _Payload | bytes:
        kind, frame = parse(raw)
        if kind is not Kind.FRAME:
            raise FrameError(f"{kind.name} came from the wrong side")
        header, inside = decode(frame)
        if not isinstance(header, Blocks):
            return frame
        layout = self._blocks.layout
        num_bytes = header.num_blocks * header.num_layers * layout.layer_bytes
        if len(inside) > 0 or not 0 < num_bytes <= max(MAX_APART_BYTES, layout.block_bytes):
            raise FrameError(f"a payload of {num_bytes} bytes apart, {len(inside)} in the frame")
        require_read(self._answers.qsize())
        self._room.acquire()
        if self._has_taker_left:
            raise PairBroken("payloads are taken no more")
        landing = self._sink.land(self._stream, header)
        try:
            payload = self._post(pair, landing, num_bytes)
        except BaseException:  # memory may have run out, too
            landing.lost()
            raise
        self._answers.put(message(Kind.POSTED, pack_posted(payload.neighbours)))
        return payload

    def _post(self, pair: Pair, landing: Landing, num_bytes: int) -> _Payload:
        neighbours = landing.neighbours() if pair.is_in_place and landing.is_wanted else []
        if neighbours and num_bytes >= STRAIGHT_BYTES * len(neighbours):
            pieces = [torch.frombuffer(piece, dtype=torch.uint8) for piece in landing.pieces(neighbours)]
            return _Payload(landing, pair.receive(pieces), num_bytes, neighbours)
        buffer = self._buffer(num_bytes)
        return _Payload(landing, pair.receive([buffer[:num_bytes]]), num_bytes, buffer=buffer)

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        """One that is large enough; what is too small is let go."""
        while not self._buffers.empty():
            buffer = self._buffers.get()
            if len(buffer) >= num_bytes:
                return buffer
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    # -- waiting and accepting ---------------------------------------------------------------------

    def _take_all(self) -> None:
        try:
            while (due := self._due.get()) is not None:
                answer = self._taken(due)
                if answer is not None:
                    self._say(message(Kind.FRAME, answer))
        except PairBroken as error:
            self._give_up(error)
        except FrameError as error:
            self._error = error
        finally:
            self._has_taker_left = True
            self._answers.put(None)
            self._room.release()  # nobody is to wait for a taker that has left

    def _taken(self, due: _Payload | bytes) -> bytes | None:
        if isinstance(due, bytes):
            return self._sink.accept(self._stream, due)
        try:
            due.arrival.wait(self._timeouts.data_s)
            if due.buffer is not None:
                due.landing.write(due.buffer[: due.num_bytes])
                self._buffers.put(due.buffer)
        except BaseException:
            due.landing.lost()
            raise
        answer = due.landing.done()
        self._room.release()
        return answer

    # -- the end -----------------------------------------------------------------------------------

    def _give_up(self, error: PairBroken) -> None:
        # Its text only: the error's frames hold the pair.
        log.warning("the pair with %s is given up: %s", self._stream.peer, str(error))
        self._answers.put(message(Kind.BROKEN, str(error).encode()))

    def _finish(self) -> None:
        """The stream has ended: whoever still waits for bytes is to wait no longer."""
        if self._pair is not None:
            self._pair.abort()
        if self._taker.ident is not None:
            self._due.put(None)
            self._taker.join()
        if self._pair is not None:
            self._pair.close()
        # Only now does nobody write any more.
        while not self._due.empty():
            due = self._due.get()
            if isinstance(due, _Payload):
                due.landing.lost()
        self._sink.disconnect(self._stream)
        self._answers.put(None)
