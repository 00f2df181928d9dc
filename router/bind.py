"""Where fronts listen."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path

# A Unix socket's path has at most 107 characters.
_LONGEST_PATH = 100


class CannotBind(Exception):
    """The address is taken, or is none of this machine's."""


def is_loopback(host: str) -> bool:
    """Whether what is bound to `host` is reached from this machine alone. IPv6 may stand in brackets."""
    name = host.strip("[]")
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def unix_target(path: Path) -> str:
    """gRPC's name of a Unix socket, whose path may be of any length: then its folder stays open."""
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        return f"unix:{path}"
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    return f"unix:/proc/self/fd/{folder}/{path.name}"
