"""The process at the other end of a Unix socket, and the proof that it is dead."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

_CREDENTIALS = struct.Struct("iII")


class ForeignPeer(Exception):
    """The other end is nobody to share memory with; says why."""


@dataclass(frozen=True, slots=True)
class PeerProcess:
    """`pidfd` becomes readable when the process is dead and no thread of it can run any more. It names this
    very process, whoever gets its pid later."""

    pid: int
    pidfd: int

    def close(self) -> None:
        os.close(self.pidfd)


def require_same_user(connected: socket.socket) -> int:
    """The peer's pid, as the kernel knows it. Raises ForeignPeer."""
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    if uid != os.geteuid():
        raise ForeignPeer(f"it runs as user {uid}, this process as {os.geteuid()}")
    return int(pid)


def peer_process(connected: socket.socket) -> PeerProcess:
    """Raises ForeignPeer.

    Were the pid another's by now, the peer would be dead, and what is sent to it afterwards reaches nobody.
    """
    pid = require_same_user(connected)
    if pid == 0:
        raise ForeignPeer("its process cannot be seen from here (another pid namespace)")
    try:
        return PeerProcess(pid, os.pidfd_open(pid))
    except OSError as error:
        raise ForeignPeer(f"its process {pid} cannot be watched: {error}") from error
