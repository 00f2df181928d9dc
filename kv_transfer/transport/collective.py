"""P's side of torch.distributed: headers go over gRPC, payloads by a pair (`pair.py`).

    P  Blocks header ──▶ D posts the receive ──▶ "posted" ──▶ P sends the payload ──▶ D answers the frame

Headers go ahead of payloads, so the next receive is posted while a payload is on its way; payloads keep their
order. A pair that breaks takes its connection with it, and the sender goes by another way for a while.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
from collections import deque
from collections.abc import Sequence

import torch

from kv_transfer.blocks import BlockStore, Cells
from kv_transfer.codec import FrameError, encode
from kv_transfer.frame import Header
from kv_transfer.transport.base import ConnectionEvents
from kv_transfer.transport.grpc import GrpcConnection, GrpcTransport
from kv_transfer.transport.pair import P_RANK, Pair, PairBroken, Sent, join, own_address_towards
from kv_transfer.transport.pair_messages import (
    METHOD,
    NUM_POSTED,
    Kind,
    message,
    parse,
    parse_meeting,
    parse_posted,
)
from kv_transfer.transport.pairing import device_of, hello_of, make_pair, usual_verify
from kv_transfer.ways import WAY_BROKEN, Way, WayUnusable
from pdserve.v1.errors import PdserveError, Unavailable

log = logging.getLogger(__name__)


class CollectiveTransport:
    name = "collective"

    def __init__(
        self, blocks: BlockStore, control: GrpcTransport, is_near_only: bool = False, timeout_s: float = 5.0
    ) -> None:
        """`is_near_only`: for D's of this host; the sockets have neither TLS nor authentication."""
        self._blocks = blocks
        self._control = control
        self._is_near_only = is_near_only
        self._timeout_s = timeout_s

    def connect(self, way: Way, events: ConnectionEvents) -> CollectiveConnection:
        host = way.address.rpartition(":")[0].strip("[]")
        if self._is_near_only and not _is_here(host):
            raise WayUnusable(f"{host} is another host, and kv_transfer.trusted_network is not set")
        connection = CollectiveConnection(self._blocks, events)
        try:
            connection.begin(self._control.open(way.address, METHOD, connection), host, self._timeout_s)
        except (PairBroken, FrameError, OSError) as error:
            connection.close()
            raise WayUnusable(f"no pair: {error}") from None
        except BaseException:
            connection.close()
            raise
        return connection


def _is_here(host: str) -> bool:
    """Whether it is an address of this machine: only those can be bound."""
    family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True


class CollectiveConnection:
    """It listens to its own control stream, whose thread sends the payloads as well."""

    is_remote_writer = False
    reads_until_answered = True

    def __init__(self, blocks: BlockStore, events: ConnectionEvents) -> None:
        self.usual_verify = usual_verify(blocks)
        self._blocks = blocks
        self._events = events
        self._control: GrpcConnection | None = None
        self._pair: Pair | None = None
        # What D says until there is a pair, or why it says nothing.
        self._said: queue.SimpleQueue[tuple[Kind, bytes] | PdserveError] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_paired = False
        self._is_lost = False
        # Payloads whose headers were sent, the oldest first; and what of them may still be on its way.
        self._announced: deque[Cells] = deque()
        self._sent: deque[Sent] = deque(maxlen=NUM_POSTED)

    def begin(self, control: GrpcConnection, host: str, timeout_s: float) -> None:
        """Raises PairBroken, FrameError, OSError."""
        self._control = control
        control.put(message(Kind.PAIR, hello_of(self._blocks).pack()))
        meeting = parse_meeting(self._hear(Kind.MEET, timeout_s))
        store = join(host, meeting.port, timeout_s)
        pair = make_pair(self._blocks, store, P_RANK, own_address_towards(host), timeout_s)
        self._pair = pair
        nonce = torch.frombuffer(bytearray(meeting.nonce), dtype=torch.uint8).to(device_of(self._blocks))
        self._sent.append(pair.send([nonce]))
        self._hear(Kind.PAIRED, timeout_s)

    def _hear(self, wanted: Kind, timeout_s: float) -> bytes:
        try:
            said = self._said.get(timeout=timeout_s)
        except queue.Empty:
            raise PairBroken(f"no answer in {timeout_s} s") from None
        if isinstance(said, PdserveError):
            raise PairBroken(said.message)
        kind, body = said
        if kind is not wanted:
            raise PairBroken(body.decode(errors="replace") or f"{kind.name} came instead of {wanted.name}")
        return body

    def send(self, header: Header, payload: Cells | None = None, target: Sequence[int] = ()) -> None:
        with self._lock:
            if self._is_lost or self._control is None:
                raise Unavailable("the pair is closed", reason="KV_STREAM_BROKEN")
            if payload is not None:
                self._announced.append(payload)
        self._control.put(message(Kind.FRAME, encode(header)))

    def close(self) -> None:
        with self._lock:
            self._is_lost = True
        if self._control is not None:
            self._control.close()  # its thread is the only other one that uses the pair
        if self._pair is not None:
            self._pair.close()
        self._announced.clear()
        self._sent.clear()

    # -- ConnectionEvents, of the control stream ----------------------------------------------------

    def on_reply(self, raw: bytes) -> None:
        try:
            kind, body = parse(raw)
            if not self._is_paired:
                self._is_paired = kind is Kind.PAIRED
                self._said.put((kind, body))
            elif kind is Kind.FRAME:
                self._events.on_reply(body)
            elif kind is Kind.POSTED:
                self._send_payload(parse_posted(body))
            else:
                raise PairBroken(body.decode(errors="replace"))
        except (PairBroken, FrameError) as error:
            self._lose(Unavailable(f"the pair broke: {error}", reason=WAY_BROKEN))

    def on_lost(self, error: PdserveError) -> None:
        if self._is_paired:
            self._lose(error)
        else:
            self._said.put(error)

    def _send_payload(self, neighbours: list[int]) -> None:
        with self._lock:
            if not self._announced:
                raise PairBroken("a receive was posted for nothing")
            payload = self._announced.popleft()
        pair = self._pair
        if pair is None:
            raise PairBroken("there is none")
        # A receive is posted only where an older one is over: by then the oldest of `_sent` has arrived.
        self._sent.append(pair.send(pair.pieces(payload, neighbours)))

    def _lose(self, error: PdserveError) -> None:
        with self._lock:
            was_lost, self._is_lost = self._is_lost, True
        if not was_lost:
            self._events.on_lost(error)
