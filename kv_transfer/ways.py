"""By which ways KV can reach a decode worker. It offers them in its reservations, the best first; a sender
takes the first one that the two can use, once for all that it sends there."""

from __future__ import annotations

from dataclasses import dataclass

# The reason of an error by which a connection tells that its way failed, and not the peer.
WAY_BROKEN = "WAY_BROKEN"


@dataclass(frozen=True, slots=True)
class Way:
    transport: str
    # In the transport's own terms.
    address: str
    # What the sender must find there, as proof that the place is the one that was meant.
    nonce: bytes | None = None


class WayUnusable(Exception):
    """These two cannot use this way, and may use another; says why. Nothing was sent by it."""


class WaySilent(WayUnusable):
    """Somebody is there and does not answer in time: it may be better later, and each try costs the wait."""
