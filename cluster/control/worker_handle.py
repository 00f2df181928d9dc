"""A worker's process as the controller sees it, whatever runs it: Ray in earnest, a plain object in tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from cluster.config import KVTransferConfig, PoolConfig
from cluster.nodes.network import Bind
from cluster.nodes.placement import Wanted
from cluster.nodes.processes import ProcessId
from engine.config import ModelConfig
from observability.config import ObservabilityConfig
from worker.identity import Role


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """All that a worker is told at its start."""

    cluster: str
    worker_id: str
    key: str
    role: Role
    model: ModelConfig
    pool: PoolConfig
    kv_transfer: KVTransferConfig
    observability: ObservabilityConfig
    bind: Bind = Bind.LOOPBACK
    # Where its log goes, on its own node; None: to stderr.
    log_folder: str | None = None

    def wanted(self) -> Wanted:
        """What it asks of Ray."""
        return Wanted.by(self.pool)


@dataclass(frozen=True, slots=True)
class Pending:
    """It has no place yet, and this is why."""

    reason: str
    # No node has room for it now.
    finds_no_room: bool = False


@dataclass(frozen=True, slots=True)
class Loading:
    """Not ready yet, and this is what it does."""

    node: str
    pid: int
    detail: str
    # As its own machine knows it. Machines may have one name, and then a pid names two processes.
    process: ProcessId | None = None


@dataclass(frozen=True, slots=True)
class Started:
    address: str


@dataclass(frozen=True, slots=True)
class StartFailed:
    """It said itself why it cannot start."""

    reason: str


StartEvent = Pending | Loading | Started | StartFailed


class WorkerGone(Exception):
    """Its process ended without being asked to; says how."""


class WorkerHandle(Protocol):
    """One process. Every method but `kill` raises WorkerGone when the process dies."""

    def start(self) -> AsyncIterator[StartEvent]:
        """Pending and then Loading any number of times, then Started or StartFailed."""

    async def wait_stopped(self) -> None:
        """Returns once `stop` has ended it."""

    async def stop(self, drain_timeout_s: float | None) -> None:
        """Drain (None: as long as its work takes), then end."""

    def kill(self) -> None:
        """At once, whatever it does. No error if it is gone."""
