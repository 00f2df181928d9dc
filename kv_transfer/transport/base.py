"""The contract of a transport: how the frames of a prefill worker reach a decode worker.

**One connection** for each pair of processes carries the frames of all their transfers, one way, and the
answers to them, the other way.

*Order.* What is sent is accepted in the order of the `send` calls, or not at all. Answers come in the
order of acceptance.

*Idempotence.* Within a transfer every Open, Blocks and Commit has its seq, counted from 0. A frame that
arrives twice is applied once, and acknowledged again while its transfer lives; after a gap the transfer is
refused. A transport need not repeat anything: what is lost fails its transfer, and the router tries again
with a new epoch.

*Who frees.* `send` has done with the payload when it returns: the sender may let go of the blocks then. A
connection with `reads_until_answered` has done with it when the frame is answered, or the connection is
closed: D answers every Blocks frame, those of transfers that are over as well.
The receiving side writes only inside `ReservationTable.writing`; a reservation that ends meanwhile keeps
its blocks (QUARANTINED) until the writing thread has left.

*Remote writers.* A connection with `is_remote_writer` puts the bytes of a Blocks frame into D's memory by
itself, before `send` lets the header go: to the blocks `target`, one for each block of the frame, which are
those that D named in its answer to the Open. D's side then gets a frame without payload. It is the sender
that says so in Open, and the receiver accepts it only of transports that it knows to be such. What such a
sender may have touched is freed only by its Commit or Closed, or by the proven death of its process.

*Several ways.* A decode worker offers the ways that it has, the best first. `connect` raises WayUnusable
where these two processes cannot use one (another host, memory that will not open), and the sender tries the
next; one that was silent (WaySilent) is left out for a while. Where a way breaks later although the peer
lives, `on_lost` gets an error whose reason is WAY_BROKEN: what was on its way fails, and what comes next goes
by another.

*Bytes apart from frames.* A transport that carries payloads on a way of their own lets each land
(`FrameSink.land`) where its header belongs. It may make several landings ahead, and accepts no later frame of
the stream before they are done; what it has made it ends, by `done` or `lost`, before `disconnect`.

*A dead peer.* `connect` gives up after its own deadline. A connection that breaks calls `on_lost` once,
and every later `send` raises; all its transfers are failed by the sender, and all reservations that its
frames had opened by the receiver (`Receiver.disconnect`). A peer that is stopped and not dead is noticed
by the sender's ack timeout and by the receiver's leases, not by the transport.

*Threads.* `send` is called by one thread at a time; it blocks while the peer takes nothing, for a bounded
time. `close` may be called from any thread (`on_reply` and `on_lost` apart, which run inside the
transport), ends a blocked `send`, and returns when no callback is running any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kv_transfer.blocks import Cells, Payload
from kv_transfer.frame import Blocks, Header
from kv_transfer.verify import Verify
from kv_transfer.ways import Way
from pdserve.v1.errors import PdserveError


class ConnectionEvents(Protocol):
    """Called from the transport's threads; must not block."""

    def on_reply(self, raw: bytes) -> None:
        """One answer of D, or several, one behind the other."""
        ...

    def on_lost(self, error: PdserveError) -> None: ...


class Connection(Protocol):
    """P's end. Its properties never change."""

    @property
    def is_remote_writer(self) -> bool: ...

    @property
    def reads_until_answered(self) -> bool: ...

    @property
    def usual_verify(self) -> Verify:
        """Where nobody has set it; D's stream says the same."""
        ...

    def send(self, header: Header, payload: Cells | None = None, target: Sequence[int] = ()) -> None:
        """`payload`: of a Blocks frame only. `target`: of a remote writer's Blocks frame only.

        Raises Unavailable where the connection is lost or closed, or the peer takes nothing.
        """
        ...

    def close(self) -> None:
        """Idempotent. Calls no `on_lost`."""
        ...


class Transport(Protocol):
    """P's end of one kind of way to any D. `name` is what a reservation calls it."""

    name: str

    def connect(self, way: Way, events: ConnectionEvents) -> Connection:
        """Raises Unavailable where nobody answers in time, WayUnusable where these two cannot use the way."""
        ...


class Landing(Protocol):
    """Where the payload of one Blocks frame goes, on D. Until `done` or `lost` the blocks are nobody
    else's."""

    @property
    def header(self) -> Blocks: ...

    @property
    def is_wanted(self) -> bool:
        """If not, the payload is to be received into nowhere: it was refused, or came before."""
        ...

    def neighbours(self) -> list[int]:
        """How its blocks lie in memory (`kv_transfer.blocks.neighbours`); of a pool in host memory only.
        The sequence's last block is by itself: P does not ship the end of it from where it lies."""
        ...

    def pieces(self, neighbours: Sequence[int]) -> list[memoryview]:
        """One for each part, to be filled in place, in the order in which they lie in memory."""
        ...

    def write(self, payload: Payload) -> None:
        """All of it, from where it was received."""
        ...

    def done(self) -> bytes:
        """All of it is there. The answer to send, in the order of the landings."""
        ...

    def lost(self) -> None:
        """It will not come, and nobody writes it any more."""
        ...


class InboundStream:
    """D's end of one connection: an identity, by which a reservation knows its sender.

    What it carries is its endpoint's to say; an Open that says otherwise is refused.
    """

    __slots__ = ("is_remote_writer", "num_refused", "peer", "sender_pid", "transport", "usual_verify")

    def __init__(
        self,
        peer: str,
        transport: str,
        is_remote_writer: bool = False,
        usual_verify: Verify | None = None,
        sender_pid: int | None = None,
    ) -> None:
        """`sender_pid`: of a sender on this node, where the kernel has told it."""
        self.peer = peer
        # Frames in a row, up to the last one.
        self.num_refused = 0
        self.sender_pid = sender_pid
        self.transport = transport
        self.is_remote_writer = is_remote_writer
        if usual_verify is None:
            usual_verify = Verify.OFF if is_remote_writer else Verify.CHECKSUM
        self.usual_verify = usual_verify


class PushEndpoint(Protocol):
    """D's listening end."""

    @property
    def ways(self) -> tuple[Way, ...]:
        """To here, the best first: what reservations offer."""
        ...

    def start(self) -> None: ...

    def stop(self) -> None:
        """Ends all streams; returns when no `accept` is running any more."""
        ...


class FrameSink(Protocol):
    """What a transport delivers to on D (`Receiver`)."""

    def accept(self, stream: InboundStream, raw: bytes) -> bytes | None:
        """The answer to send, if the frame takes one. Raises FrameError where the stream must be ended."""
        ...

    def land(self, stream: InboundStream, header: Blocks) -> Landing:
        """For a Blocks frame whose payload comes by itself, instead of `accept`."""
        ...

    def disconnect(self, stream: InboundStream) -> None:
        """Once for each stream, when no `accept` of it is running or will come."""
        ...

    def peer_gone(self, stream: InboundStream) -> None:
        """Proof that nobody behind a remote writer's stream can write any more, before or after its end."""
        ...
