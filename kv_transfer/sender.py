"""P's end of all hand-overs: finds or makes the connection that a transfer needs."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial

from kv_transfer.blocks import BlockStore
from kv_transfer.broken_ways import BrokenWays
from kv_transfer.counters import TransferCounts, TransportCounters
from kv_transfer.layout import KVLayout
from kv_transfer.outbound import Outbound
from kv_transfer.send_queue import SenderConfig
from kv_transfer.transfer import PushTarget, Transfer, TransferReport
from kv_transfer.transport.base import Transport
from kv_transfer.ways import Way
from pdserve.v1.errors import FailedPrecondition, Unavailable

# D's process and where it is reached: a new one at an old address gets connections of its own.
_Peer = tuple[str, tuple[Way, ...]]


class Sender:
    """Thread-safe. A transfer keeps to one channel: a connection, and a thread that feeds it. To a decode
    worker there is one, or up to `SenderConfig.num_channels` while transfers are many. Idle threads sleep.
    """

    def __init__(
        self,
        layout: KVLayout,
        blocks: BlockStore,
        transports: Mapping[str, Transport],
        config: SenderConfig | None = None,
    ) -> None:
        self._layout = layout
        self._blocks = blocks
        self._transports = dict(transports)
        self._config = config or SenderConfig()
        self._lock = threading.Lock()
        self._outbounds: dict[_Peer, list[Outbound]] = {}
        self._broken = BrokenWays(self._config.broken_way_pause_s)
        # Of connections that have ended.
        self._past_bytes_sent = 0
        self.counters = TransportCounters()
        self._routes: dict[str, str] = {}
        self._is_closed = False

    def open(self, target: PushTarget) -> Transfer:
        """Returns at once: connecting is the thread's. Raises FailedPrecondition for an unknown transport,
        Unavailable after `close`."""
        outbound = self._outbound(target)
        transfer = outbound.open(target)
        # A future keeps its callbacks: one that held the transfer would make a circle of the two.
        transfer.done.add_done_callback(partial(self._count, outbound, target.instance_id))
        return transfer

    def close(self) -> None:
        """Fails all transfers and returns when every thread has left."""
        with self._lock:
            self._is_closed = True
            outbounds = self._all()
        for outbound in outbounds:
            outbound.close(Unavailable("the prefill worker stops", reason="STOPPING"))
        for outbound in outbounds:
            outbound.join()

    @property
    def num_transfers(self) -> int:
        with self._lock:
            return sum(outbound.num_transfers for outbound in self._all())

    @property
    def bytes_sent(self) -> int:
        with self._lock:
            return self._past_bytes_sent + sum(outbound.bytes_sent for outbound in self._all())

    def routes(self) -> dict[str, str]:
        """By which transport KV has gone to each D that is known now: instance → transport."""
        with self._lock:
            return dict(self._routes)

    def _count(self, outbound: Outbound, instance_id: str, done: Future[TransferReport | None]) -> None:
        report = None if done.exception() is not None else done.result()
        if report is None:
            return
        transport = outbound.way.transport
        counts = TransferCounts(1, report.transfer_bytes, report.transfer_ms, report.hidden_bytes)
        self.counters.add(transport, counts)
        with self._lock:
            if not outbound.is_lost:
                self._routes[instance_id] = transport

    def check_integrity(self) -> None:
        with self._lock:
            outbounds = self._all()
        for outbound in outbounds:
            outbound.check_integrity()

    def _outbound(self, target: PushTarget) -> Outbound:
        peer = target.instance_id, target.ways
        with self._lock:
            if self._is_closed:
                raise Unavailable("the prefill worker stops", reason="STOPPING")
            for lost in [each for each in self._outbounds.get(peer, ()) if each.is_lost]:
                self._drop(peer, lost)
            ways = self._ways(target)
            all_channels = self._outbounds.get(peer, [])
            channels = [each for each in all_channels if each.ways == ways]
            for other in all_channels:
                if other not in channels and other.num_transfers == 0:
                    other.on_lost(Unavailable("another way is to be tried", reason="OTHER_WAY"))
            idlest = min(channels, key=lambda each: each.num_transfers, default=None)
            is_free = idlest is not None and idlest.num_transfers == 0
            if idlest is not None and (is_free or len(channels) >= self._config.num_channels):
                return idlest
            on_silent = partial(self._avoid, target.instance_id)
            made = Outbound(
                ways, self._transports, self._layout, self._blocks, self._config, self._forget, on_silent
            )
            self._outbounds[peer] = [*all_channels, made]
            return made

    def _ways(self, target: PushTarget) -> tuple[Way, ...]:
        """Those that can be used, less those that broke not long ago."""
        known = [way for way in target.ways if way.transport in self._transports]
        if not known:
            offered = ", ".join(way.transport for way in target.ways)
            raise FailedPrecondition(f"no such transport here: {offered}", reason="WRONG_TRANSPORT")
        instance_id = target.instance_id
        whole = [way for way in known if not self._broken.is_avoided(instance_id, way.transport)]
        return tuple(whole or known)

    def _avoid(self, instance_id: str, transport: str) -> None:
        with self._lock:
            self._broken.add(instance_id, transport)

    def _forget(self, ended: Outbound) -> None:
        with self._lock:
            for peer, channels in list(self._outbounds.items()):
                if ended in channels:
                    self._drop(peer, ended)

    def _all(self) -> list[Outbound]:
        return [outbound for channels in self._outbounds.values() for outbound in channels]

    def _drop(self, peer: _Peer, lost: Outbound) -> None:
        left = [outbound for outbound in self._outbounds.pop(peer) if outbound is not lost]
        if left:
            self._outbounds[peer] = left
        else:
            self._routes.pop(peer[0], None)
        self._past_bytes_sent += lost.bytes_sent
        if lost.is_way_broken:
            self._broken.add(peer[0], lost.way.transport)
