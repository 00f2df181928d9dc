"""What the client hands out: frozen values with the names of the protos, and their making from messages."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import TypeVar

from google.protobuf.message import Message

from pdserve.v1 import cluster_pb2, generation_pb2

T = TypeVar("T")


class FinishReason(Enum):
    EOS = "eos"
    STOP = "stop"  # a stop string or a stop token id
    LENGTH = "length"


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
class ChatMessage:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]  # best first


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    queue_ms: float
    prefill_ms: float
    transfer_ms: float
    transfer_bytes: int
    ttft_ms: float
    decode_ms: float
    mean_itl_ms: float


@dataclass(frozen=True, slots=True)
class Started:
    """With the first token of sequence `index`."""

    index: int
    prompt_tokens: int
    cached_tokens: int
    prefill_worker: str
    decode_worker: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Delta:
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]  # one for each token id, if asked for


@dataclass(frozen=True, slots=True)
class Finished:
    index: int
    finish_reason: FinishReason
    matched_stop: str | None
    matched_token_id: int | None
    usage: Usage
    timings: Timings
    num_resumes: int
    # Of the last attempt; Started names those of the first.
    prefill_worker: str
    decode_worker: str


Event = Started | Delta | Finished


@dataclass(frozen=True, slots=True)
class Completion:
    """One of the n sequences, whole."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]
    finish_reason: FinishReason
    matched_stop: str | None
    matched_token_id: int | None
    usage: Usage
    timings: Timings
    num_resumes: int
    prefill_worker: str
    decode_worker: str


@dataclass(frozen=True, slots=True)
class Generation:
    """The whole answer. The plain properties speak of the first sequence."""

    request_id: str
    completions: tuple[Completion, ...]

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.completions[0].finish_reason

    @property
    def usage(self) -> Usage:
        return self.completions[0].usage

    @property
    def timings(self) -> Timings:
        return self.completions[0].timings

    @property
    def prefill_worker(self) -> str:
        return self.completions[0].prefill_worker

    @property
    def decode_worker(self) -> str:
        return self.completions[0].decode_worker


@dataclass(frozen=True, slots=True)
class Model:
    id: str
    max_model_len: int
    vocab_size: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    max_model_len: int
    block_size: int
    max_num_seqs: int
    kv_blocks_total: int
    max_sequence_tokens: int


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


@dataclass(frozen=True, slots=True)
class Pool:
    role: Role
    target: int
    workers: tuple[Worker, ...]
    unrecoverable_reason: str | None


@dataclass(frozen=True, slots=True)
class Cluster:
    name: str
    version: int
    model: str
    router_grpc: str
    pools: tuple[Pool, ...]

    def pool(self, role: Role) -> Pool | None:
        return next((pool for pool in self.pools if pool.role is role), None)


def _same_names(kind: type[T], message: Message) -> T:
    """A value whose fields are all named as in the message."""
    return kind(**{field.name: getattr(message, field.name) for field in fields(kind)})  # type: ignore[arg-type]


def _finish_reason(value: generation_pb2.FinishReason) -> FinishReason:
    return FinishReason[generation_pb2.FinishReason.Name(value).removeprefix("FINISH_REASON_")]


def _logprobs(message: generation_pb2.PositionLogprobs) -> PositionLogprobs:
    top = tuple(TokenLogprob(entry.token_id, entry.logprob) for entry in message.top)
    return PositionLogprobs(TokenLogprob(message.chosen.token_id, message.chosen.logprob), top)


def _matched(message: generation_pb2.Finished) -> tuple[str | None, int | None]:
    which = message.WhichOneof("matched")
    return (
        message.matched_stop if which == "matched_stop" else None,
        message.matched_token_id if which == "matched_token_id" else None,
    )


def event_of(message: generation_pb2.GenerateStreamResponse) -> Event:
    which = message.WhichOneof("event")
    if which == "started":
        started = message.started
        return Started(
            message.index,
            started.prompt_tokens,
            started.cached_tokens,
            started.prefill_worker,
            started.decode_worker,
            started.request_id,
        )
    if which == "delta":
        delta = message.delta
        logprobs = tuple(_logprobs(position) for position in delta.logprobs)
        return Delta(message.index, delta.text, tuple(delta.token_ids), logprobs)
    finished = message.finished
    matched_stop, matched_token_id = _matched(finished)
    return Finished(
        message.index,
        _finish_reason(finished.finish_reason),
        matched_stop,
        matched_token_id,
        _same_names(Usage, finished.usage),
        _same_names(Timings, finished.timings),
        finished.num_resumes,
        finished.prefill_worker,
        finished.decode_worker,
    )


def generation_of(message: generation_pb2.GenerateResponse) -> Generation:
    return Generation(message.request_id, tuple(_completion(each) for each in message.completions))


def _completion(message: generation_pb2.Completion) -> Completion:
    finished = message.finished
    matched_stop, matched_token_id = _matched(finished)
    return Completion(
        index=message.index,
        text=message.text,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(_logprobs(position) for position in message.logprobs),
        finish_reason=_finish_reason(finished.finish_reason),
        matched_stop=matched_stop,
        matched_token_id=matched_token_id,
        usage=_same_names(Usage, finished.usage),
        timings=_same_names(Timings, finished.timings),
        num_resumes=finished.num_resumes,
        prefill_worker=finished.prefill_worker,
        decode_worker=finished.decode_worker,
    )


def model_of(message: generation_pb2.GetModelResponse) -> Model:
    return Model(
        message.id,
        message.max_model_len,
        message.vocab_size,
        message.dtype,
        tuple(message.eos_token_ids),
        message.has_chat_template,
    )


def cluster_of(message: cluster_pb2.ClusterSnapshot) -> Cluster:
    pools = tuple(_pool(pool) for pool in message.pools)
    return Cluster(message.name, message.version, message.model, message.router_grpc, pools)


def _pool(message: cluster_pb2.PoolStatus) -> Pool:
    role = _role(message.role)
    workers = tuple(_worker(worker) for worker in message.workers)
    return Pool(role, message.target, workers, message.unrecoverable_reason or None)


def _role(value: cluster_pb2.Role) -> Role:
    return Role[cluster_pb2.Role.Name(value).removeprefix("ROLE_")]


def _worker(message: cluster_pb2.WorkerStatus) -> Worker:
    return Worker(
        id=message.id,
        instance_id=message.instance_id,
        role=_role(message.role),
        state=WorkerState[cluster_pb2.WorkerState.Name(message.state).removeprefix("WORKER_STATE_")],
        detail=message.detail,
        address=message.address,
        pid=message.pid,
        node=message.node,
        device=message.device,
        limits=_same_names(WorkerLimits, message.limits),
        load=_same_names(WorkerLoad, message.load),
        counters=_same_names(WorkerCounters, message.counters),
    )
