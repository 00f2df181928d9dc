"""From the wire's messages to the client's results."""

from __future__ import annotations

from dataclasses import fields
from typing import TypeVar

from google.protobuf.message import Message

from pdserve.cluster_results import (
    Cluster,
    KVRoute,
    Pool,
    Quantiles,
    Quarantine,
    Role,
    Router,
    RouterLoad,
    TransferCounters,
    Worker,
    WorkerCounters,
    WorkerLimits,
    WorkerLoad,
    WorkerState,
)
from pdserve.results import (
    Completion,
    Delta,
    Event,
    Finished,
    FinishReason,
    Generation,
    Model,
    ModelShape,
    PositionLogprobs,
    Started,
    Timings,
    TokenLogprob,
    Usage,
)
from pdserve.v1 import cluster_pb2, generation_pb2

T = TypeVar("T")


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
        _shape(message.shape) if message.HasField("shape") else None,
    )


def _shape(message: generation_pb2.ModelShape) -> ModelShape:
    return ModelShape(
        message.num_layer_weights,
        message.num_head_weights,
        message.num_query_heads,
        message.num_kv_heads,
        message.head_dim,
        tuple(window or None for window in message.windows),
    )


def cluster_of(message: cluster_pb2.ClusterSnapshot) -> Cluster:
    pools = tuple(_pool(pool) for pool in message.pools)
    http = message.router_http or None
    load = _router_load(message.router)
    routers = tuple(
        Router(each.id, each.grpc, each.http or None, each.detail, each.pid or None)
        for each in message.routers
    )
    first = message.router_grpc
    name, version, model = message.name, message.version, message.model
    return Cluster(name, version, model, first, http, pools, load, routers, message.router_tls)


def _router_load(message: cluster_pb2.RouterLoad) -> RouterLoad:
    return RouterLoad(
        message.num_running,
        message.num_waiting,
        message.window_ms,
        message.num_finished,
        message.prompt_tokens_per_s,
        message.output_tokens_per_s,
        _same_names(Quantiles, message.ttft_ms),
        _same_names(Quantiles, message.itl_ms),
    )


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
        transfers=tuple(_same_names(TransferCounters, each) for each in message.counters.transfers),
        kv_routes=tuple(_same_names(KVRoute, each) for each in message.kv_routes),
        quarantines=tuple(_same_names(Quarantine, each) for each in message.quarantines),
        kernels=message.kernels,
        speculation=message.speculation or None,
    )
