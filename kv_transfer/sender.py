"""P's end of all hand-overs: finds or makes the connection that a transfer needs."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from kv_transfer.blocks import BlockStore
from kv_transfer.layout import KVLayout
from kv_transfer.outbound import Outbound
from kv_transfer.send_queue import SenderConfig
from kv_transfer.transfer import PushTarget, Transfer
from kv_transfer.transport.base import Transport
from pdserve.v1.errors import FailedPrecondition, Unavailable


class Sender:
    """Thread-safe. One thread for each decode worker that this one sends to; idle threads sleep."""

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
        self._outbounds: dict[tuple[str, str, str], Outbound] = {}
        # Of connections that have ended.
        self._past_bytes_sent = 0
        self._is_closed = False

    def open(self, target: PushTarget) -> Transfer:
        """Returns at once: connecting is the thread's. Raises FailedPrecondition for an unknown transport,
        Unavailable after `close`."""
        transport = self._transports.get(target.transport)
        if transport is None:
            raise FailedPrecondition(f"no transport {target.transport!r} here", reason="WRONG_TRANSPORT")
        return self._outbound(target, transport).open(target)

    def close(self) -> None:
        """Fails all transfers and returns when every thread has left."""
        with self._lock:
            self._is_closed = True
            outbounds = list(self._outbounds.values())
        for outbound in outbounds:
            outbound.close(Unavailable("the prefill worker stops", reason="STOPPING"))
        for outbound in outbounds:
            outbound.join()

    @property
    def num_transfers(self) -> int:
        with self._lock:
            return sum(outbound.num_transfers for outbound in self._outbounds.values())

    @property
    def bytes_sent(self) -> int:
        with self._lock:
            return self._past_bytes_sent + sum(outbound.bytes_sent for outbound in self._outbounds.values())

    def check_integrity(self) -> None:
        with self._lock:
            outbounds = list(self._outbounds.values())
        for outbound in outbounds:
            outbound.check_integrity()

    def _outbound(self, target: PushTarget, transport: Transport) -> Outbound:
        """The instance is part of the key: a new process at an old address gets a new connection."""
        key = (target.transport, target.address, target.instance_id)
        with self._lock:
            if self._is_closed:
                raise Unavailable("the prefill worker stops", reason="STOPPING")
            outbound = self._outbounds.get(key)
            if outbound is None or outbound.is_lost:
                if outbound is not None:
                    self._past_bytes_sent += outbound.bytes_sent
                outbound = Outbound(
                    target.address, transport, self._layout, self._blocks, self._config, self._forget
                )
                self._outbounds[key] = outbound
            return outbound

    def _forget(self, ended: Outbound) -> None:
        with self._lock:
            for key, outbound in list(self._outbounds.items()):
                if outbound is ended:
                    del self._outbounds[key]
                    self._past_bytes_sent += ended.bytes_sent
