"""D's side of torch.distributed: a receive is posted for each payload as soon as it is announced, and frames
are accepted in their order, each when its payload is there.

Large parts of blocks arrive in place: until they are there, or the pair is closed, their blocks are nobody
else's, whatever becomes of the reservation. Small ones, and a GPU's, come by way of buffers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from kv_transfer.blocks import BlockStore
from kv_transfer.transport.base import FrameSink, InboundStream
from kv_transfer.transport.collective import CollectiveTransport
from kv_transfer.transport.inbound_pair import InboundPair, PairTimeouts
from kv_transfer.transport.pair_messages import METHOD
from kv_transfer.transport.pairing import usual_verify


class CollectiveStreams:
    """A kind of stream for `GrpcPushServer`."""

    transport = CollectiveTransport.name
    method = METHOD

    def __init__(
        self, sink: FrameSink, blocks: BlockStore, host: str, timeouts: PairTimeouts | None = None
    ) -> None:
        """`host`: where pairs listen."""
        self._sink = sink
        self._blocks = blocks
        self._host = host.strip("[]")
        self._timeouts = timeouts or PairTimeouts()
        self._living: set[InboundPair] = set()
        self._lock = threading.Lock()

    def serve(self, messages: Iterator[bytes], peer: str) -> Iterator[bytes]:
        stream = InboundStream(peer, self.transport, usual_verify=usual_verify(self._blocks))
        inbound = InboundPair(messages, stream, self._sink, self._blocks, self._host, self._timeouts)
        with self._lock:
            self._living = {each for each in self._living if each.is_alive()} | {inbound}
        inbound.start()
        yield from inbound.answers()

    def stop(self) -> None:
        with self._lock:
            living = list(self._living)
        for inbound in living:
            inbound.join()
