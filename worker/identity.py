"""Who a worker is, and what state it reports. Plain values."""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import dataclass, field
from enum import Enum


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"  # both phases in one worker


class WorkerState(Enum):
    """What a worker knows of itself; STARTING, UNHEALTHY and DEAD are the controller's to tell."""

    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"  # its engine is gone: it answers, and takes nothing


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """`worker_id` names the place in the pool, for people. `instance_id` is made anew at every start."""

    worker_id: str
    role: Role
    node: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    instance_id: str = field(default_factory=lambda: uuid.uuid4().hex)
