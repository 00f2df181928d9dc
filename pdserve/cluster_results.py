"""What the client hands out of a cluster: routers, pools and workers, with the names of the protos."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"


class WorkerState(Enum):
    STARTING = "starting"
    READY = "ready"
    UNHEALTHY = "unhealthy"
    DRAINING = "draining"
    STOPPED = "stopped"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    max_model_len: int
    block_size: int
    max_num_seqs: int
    kv_blocks_total: int
    max_sequence_tokens: int
    # Of its arithmetic on a CPU; 0 on any other device.
    num_threads: int


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    num_running: int
    num_waiting: int
    queued_prompt_tokens: int
    kv_blocks_free: int
    kv_blocks_used: int
    num_reservations: int
    num_transfers: int
    kv_blocks_quarantined: int


@dataclass(frozen=True, slots=True)
class WorkerCounters:
    tokens_prefilled: int
    tokens_decoded: int
    kv_bytes_sent: int
    kv_bytes_received: int
    num_preemptions: int
    num_expired_leases: int
    rss_bytes: int
    draft_tokens: int
    accepted_draft_tokens: int


@dataclass(frozen=True, slots=True)
class TransferCounters:
    """Sums over the hand-overs by one transport that arrived whole."""

    transport: str
    num_transfers: int
    num_bytes: int
    transfer_ms: float
    # A prefill worker's.
    hidden_bytes: int
    # A decode worker's: of how many sequences the first step began, and the sums of their two times.
    num_started: int
    handover_ms: float
    decode_start_ms: float


@dataclass(frozen=True, slots=True)
class KVRoute:
    """How a prefill worker's KV goes to one decode worker."""

    instance_id: str
    transport: str


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Blocks that a process on the worker's node might still write, although their transfers ended."""

    sender_pid: int
    num_blocks: int
    age_ms: int


@dataclass(frozen=True, slots=True)
class Worker:
    id: str
    instance_id: str
    role: Role
    state: WorkerState
    detail: str
    address: str
    pid: int
    node: str
    device: str
    limits: WorkerLimits
    load: WorkerLoad
    counters: WorkerCounters
    transfers: tuple[TransferCounters, ...] = ()
    kv_routes: tuple[KVRoute, ...] = ()
    quarantines: tuple[Quarantine, ...] = ()
    # What computes: "compiled", or what instead and why. Empty: not known yet.
    kernels: str = ""
    # None: it drafts nothing.
    speculation: str | None = None


@dataclass(frozen=True, slots=True)
class Pool:
    role: Role
    target: int
    workers: tuple[Worker, ...]
    unrecoverable_reason: str | None


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of `count` values, to within 5 %; 0 where there is none."""

    count: int
    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class RouterLoad:
    """What a router's clients feel; all but the first two is of the last `window_ms`."""

    num_running: int
    num_waiting: int
    window_ms: int
    num_finished: int
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    ttft_ms: Quantiles
    itl_ms: Quantiles


@dataclass(frozen=True, slots=True)
class Router:
    """One of the routers, which all serve the same pools."""

    id: str
    grpc: str
    http: str | None
    # Why none is there now; empty: one is.
    detail: str
    # None: not known.
    pid: int | None


@dataclass(frozen=True, slots=True)
class Cluster:
    name: str
    version: int
    model: str
    router_grpc: str
    # None: the router serves no HTTP.
    router_http: str | None
    pools: tuple[Pool, ...]
    # Of the router that was asked.
    load: RouterLoad
    # All of them; the two addresses above are the first one's.
    routers: tuple[Router, ...] = ()
    # Whether their ports want TLS.
    router_tls: bool = False

    @property
    def scheme(self) -> str:
        """Of all routers' HTTP."""
        return "https" if self.router_tls else "http"

    @property
    def http_url(self) -> str | None:
        return None if self.router_http is None else f"{self.scheme}://{self.router_http}"

    def pool(self, role: Role) -> Pool | None:
        return next((pool for pool in self.pools if pool.role is role), None)
