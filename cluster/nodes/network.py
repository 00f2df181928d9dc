"""Where workers listen. Nothing leaves loopback unless the configuration says so."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from enum import Enum

from cluster.config import ClusterConfig
from cluster.errors import PartError

LOOPBACK = "127.0.0.1"


class Bind(Enum):
    LOOPBACK = "loopback"
    # The address by which other nodes know the worker's node.
    NODE = "node"


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def is_here(address: str, here: str) -> bool:
    """Whether a node of that address is on the machine whose address is `here`."""
    return address == here or is_loopback(address)


def choose_bind(config: ClusterConfig, node_addresses: Iterable[str], here: str) -> Bind:
    """Raises PartError where workers would have to be on a network, and nobody has said that they may."""
    wanted = config.network.bind
    if wanted != "auto":
        return Bind(wanted)
    elsewhere = sorted({address for address in node_addresses if not is_here(address, here)})
    if elsewhere:
        raise PartError(
            f"this Ray has other nodes ({', '.join(elsewhere)}), whose workers could be reached over the "
            "network only. Write network: {bind: node} with tls: {ca, cert, key}, or with insecure: true "
            "where that network is trusted; to use this node alone, network: {bind: loopback}"
        )
    return Bind.LOOPBACK


def in_url(address: str) -> str:
    """An address as it stands before a port: IPv6 in brackets."""
    return f"[{address}]" if ":" in address else address
