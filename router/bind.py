"""Where fronts listen."""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path

# A Unix socket's path has at most 107 characters.
_LONGEST_PATH = 100


class CannotBind(Exception):
    """The address is taken, or is none of this machine's."""


def refuse_taken(address: str) -> None:
    """Raises CannotBind where somebody listens.

    Both fronts listen so that another process of this user may do so beside them (SO_REUSEPORT): a router's
    successor. Anybody else would get some of the clients.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # Connections that ended just now do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except (OSError, ValueError, OverflowError) as error:
            raise CannotBind(f"cannot serve at {address}: {error}") from error


def stop_listening(address: str) -> None:
    """No new connection comes to this process; those that it has stay. gRPC has no way to say so, hence the
    descriptors: on Linux, a listening socket that is shut down is out of its port's group at once.
    """
    port = int(address.rpartition(":")[2])
    for name in os.listdir("/proc/self/fd"):
        try:
            listening = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # no socket, or closed meanwhile
        with listening:
            if listening.family in (socket.AF_INET, socket.AF_INET6) and _is_listener(listening, port):
                listening.shutdown(socket.SHUT_RDWR)


def _is_listener(found: socket.socket, port: int) -> bool:
    is_listening = bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return is_listening and found.getsockname()[1] == port


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
