from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_COLOCATED: _ClassVar[Role]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_STARTING: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_UNHEALTHY: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
    WORKER_STATE_STOPPED: _ClassVar[WorkerState]
    WORKER_STATE_DEAD: _ClassVar[WorkerState]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ROLE_COLOCATED: Role
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_STARTING: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_UNHEALTHY: WorkerState
WORKER_STATE_DRAINING: WorkerState
WORKER_STATE_STOPPED: WorkerState
WORKER_STATE_DEAD: WorkerState

class WatchRequest(_message.Message):
    __slots__ = ("router_id",)
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    def __init__(self, router_id: _Optional[str] = ...) -> None: ...

class GetClusterRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ScalePoolRequest(_message.Message):
    __slots__ = ("role", "target")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    role: Role
    target: int
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., target: _Optional[int] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "replace", "timeout_ms", "replace_first")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIRST_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    replace: bool
    timeout_ms: int
    replace_first: bool
    def __init__(self, worker_id: _Optional[str] = ..., replace: _Optional[bool] = ..., timeout_ms: _Optional[int] = ..., replace_first: _Optional[bool] = ...) -> None: ...

class RestartRouterRequest(_message.Message):
    __slots__ = ("router_id", "timeout_ms")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    timeout_ms: int
    def __init__(self, router_id: _Optional[str] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class ClusterSnapshot(_message.Message):
    __slots__ = ("name", "version", "model", "pools", "router_grpc", "router_http", "router", "routers", "router_tls")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    ROUTER_GRPC_FIELD_NUMBER: _ClassVar[int]
    ROUTER_HTTP_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    ROUTER_TLS_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: int
    model: str
    pools: _containers.RepeatedCompositeFieldContainer[PoolStatus]
    router_grpc: str
    router_http: str
    router: RouterLoad
    routers: _containers.RepeatedCompositeFieldContainer[RouterStatus]
    router_tls: bool
    def __init__(self, name: _Optional[str] = ..., version: _Optional[int] = ..., model: _Optional[str] = ..., pools: _Optional[_Iterable[_Union[PoolStatus, _Mapping]]] = ..., router_grpc: _Optional[str] = ..., router_http: _Optional[str] = ..., router: _Optional[_Union[RouterLoad, _Mapping]] = ..., routers: _Optional[_Iterable[_Union[RouterStatus, _Mapping]]] = ..., router_tls: _Optional[bool] = ...) -> None: ...

class RouterStatus(_message.Message):
    __slots__ = ("id", "grpc", "http", "detail", "pid")
    ID_FIELD_NUMBER: _ClassVar[int]
    GRPC_FIELD_NUMBER: _ClassVar[int]
    HTTP_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    id: str
    grpc: str
    http: str
    detail: str
    pid: int
    def __init__(self, id: _Optional[str] = ..., grpc: _Optional[str] = ..., http: _Optional[str] = ..., detail: _Optional[str] = ..., pid: _Optional[int] = ...) -> None: ...

class RouterLoad(_message.Message):
    __slots__ = ("num_running", "num_waiting", "window_ms", "num_finished", "prompt_tokens_per_s", "output_tokens_per_s", "ttft_ms", "itl_ms")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    WINDOW_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_FINISHED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    ITL_MS_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    window_ms: int
    num_finished: int
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    ttft_ms: Quantiles
    itl_ms: Quantiles
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., window_ms: _Optional[int] = ..., num_finished: _Optional[int] = ..., prompt_tokens_per_s: _Optional[float] = ..., output_tokens_per_s: _Optional[float] = ..., ttft_ms: _Optional[_Union[Quantiles, _Mapping]] = ..., itl_ms: _Optional[_Union[Quantiles, _Mapping]] = ...) -> None: ...

class Quantiles(_message.Message):
    __slots__ = ("count", "p50", "p99")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    P50_FIELD_NUMBER: _ClassVar[int]
    P99_FIELD_NUMBER: _ClassVar[int]
    count: int
    p50: float
    p99: float
    def __init__(self, count: _Optional[int] = ..., p50: _Optional[float] = ..., p99: _Optional[float] = ...) -> None: ...

class PoolStatus(_message.Message):
    __slots__ = ("role", "target", "workers", "unrecoverable_reason")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    UNRECOVERABLE_REASON_FIELD_NUMBER: _ClassVar[int]
    role: Role
    target: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    unrecoverable_reason: str
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., target: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., unrecoverable_reason: _Optional[str] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("id", "instance_id", "role", "state", "detail", "address", "pid", "node", "device", "limits", "load", "counters", "kv_routes", "quarantines", "kernels", "speculation", "vitals")
    ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    KV_ROUTES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINES_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    VITALS_FIELD_NUMBER: _ClassVar[int]
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
    kv_routes: _containers.RepeatedCompositeFieldContainer[KVRoute]
    quarantines: _containers.RepeatedCompositeFieldContainer[Quarantine]
    kernels: str
    speculation: str
    vitals: Vitals
    def __init__(self, id: _Optional[str] = ..., instance_id: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., state: _Optional[_Union[WorkerState, str]] = ..., detail: _Optional[str] = ..., address: _Optional[str] = ..., pid: _Optional[int] = ..., node: _Optional[str] = ..., device: _Optional[str] = ..., limits: _Optional[_Union[WorkerLimits, _Mapping]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., counters: _Optional[_Union[WorkerCounters, _Mapping]] = ..., kv_routes: _Optional[_Iterable[_Union[KVRoute, _Mapping]]] = ..., quarantines: _Optional[_Iterable[_Union[Quarantine, _Mapping]]] = ..., kernels: _Optional[str] = ..., speculation: _Optional[str] = ..., vitals: _Optional[_Union[Vitals, _Mapping]] = ...) -> None: ...

class Vitals(_message.Message):
    __slots__ = ("progress", "is_working", "is_compiling", "step_ms", "heartbeat_age_ms")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    IS_WORKING_FIELD_NUMBER: _ClassVar[int]
    IS_COMPILING_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    progress: int
    is_working: bool
    is_compiling: bool
    step_ms: float
    heartbeat_age_ms: int
    def __init__(self, progress: _Optional[int] = ..., is_working: _Optional[bool] = ..., is_compiling: _Optional[bool] = ..., step_ms: _Optional[float] = ..., heartbeat_age_ms: _Optional[int] = ...) -> None: ...

class Quarantine(_message.Message):
    __slots__ = ("sender_pid", "num_blocks", "age_ms")
    SENDER_PID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    sender_pid: int
    num_blocks: int
    age_ms: int
    def __init__(self, sender_pid: _Optional[int] = ..., num_blocks: _Optional[int] = ..., age_ms: _Optional[int] = ...) -> None: ...

class KVRoute(_message.Message):
    __slots__ = ("instance_id", "transport")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    transport: str
    def __init__(self, instance_id: _Optional[str] = ..., transport: _Optional[str] = ...) -> None: ...

class WorkerLimits(_message.Message):
    __slots__ = ("max_model_len", "block_size", "max_num_seqs", "kv_blocks_total", "max_sequence_tokens", "layout", "num_threads")
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NUM_THREADS_FIELD_NUMBER: _ClassVar[int]
    max_model_len: int
    block_size: int
    max_num_seqs: int
    kv_blocks_total: int
    max_sequence_tokens: int
    layout: KVLayout
    num_threads: int
    def __init__(self, max_model_len: _Optional[int] = ..., block_size: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., kv_blocks_total: _Optional[int] = ..., max_sequence_tokens: _Optional[int] = ..., layout: _Optional[_Union[KVLayout, _Mapping]] = ..., num_threads: _Optional[int] = ...) -> None: ...

class KVLayout(_message.Message):
    __slots__ = ("num_layers", "num_kv_heads", "head_dim", "block_size", "dtype", "model_fingerprint")
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    model_fingerprint: str
    def __init__(self, num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., block_size: _Optional[int] = ..., dtype: _Optional[str] = ..., model_fingerprint: _Optional[str] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("num_running", "num_waiting", "queued_prompt_tokens", "kv_blocks_free", "kv_blocks_used", "num_reservations", "num_transfers", "kv_blocks_quarantined")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    NUM_RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    queued_prompt_tokens: int
    kv_blocks_free: int
    kv_blocks_used: int
    num_reservations: int
    num_transfers: int
    kv_blocks_quarantined: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., queued_prompt_tokens: _Optional[int] = ..., kv_blocks_free: _Optional[int] = ..., kv_blocks_used: _Optional[int] = ..., num_reservations: _Optional[int] = ..., num_transfers: _Optional[int] = ..., kv_blocks_quarantined: _Optional[int] = ...) -> None: ...

class WorkerCounters(_message.Message):
    __slots__ = ("tokens_prefilled", "tokens_decoded", "kv_bytes_sent", "kv_bytes_received", "num_preemptions", "num_expired_leases", "rss_bytes", "draft_tokens", "accepted_draft_tokens", "transfers")
    TOKENS_PREFILLED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_DECODED_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPIRED_LEASES_FIELD_NUMBER: _ClassVar[int]
    RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    tokens_prefilled: int
    tokens_decoded: int
    kv_bytes_sent: int
    kv_bytes_received: int
    num_preemptions: int
    num_expired_leases: int
    rss_bytes: int
    draft_tokens: int
    accepted_draft_tokens: int
    transfers: _containers.RepeatedCompositeFieldContainer[TransferCounters]
    def __init__(self, tokens_prefilled: _Optional[int] = ..., tokens_decoded: _Optional[int] = ..., kv_bytes_sent: _Optional[int] = ..., kv_bytes_received: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_expired_leases: _Optional[int] = ..., rss_bytes: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_draft_tokens: _Optional[int] = ..., transfers: _Optional[_Iterable[_Union[TransferCounters, _Mapping]]] = ...) -> None: ...

class TransferCounters(_message.Message):
    __slots__ = ("transport", "num_transfers", "num_bytes", "transfer_ms", "hidden_bytes", "num_started", "handover_ms", "decode_start_ms")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    NUM_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_STARTED_FIELD_NUMBER: _ClassVar[int]
    HANDOVER_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_START_MS_FIELD_NUMBER: _ClassVar[int]
    transport: str
    num_transfers: int
    num_bytes: int
    transfer_ms: float
    hidden_bytes: int
    num_started: int
    handover_ms: float
    decode_start_ms: float
    def __init__(self, transport: _Optional[str] = ..., num_transfers: _Optional[int] = ..., num_bytes: _Optional[int] = ..., transfer_ms: _Optional[float] = ..., hidden_bytes: _Optional[int] = ..., num_started: _Optional[int] = ..., handover_ms: _Optional[float] = ..., decode_start_ms: _Optional[float] = ...) -> None: ...
