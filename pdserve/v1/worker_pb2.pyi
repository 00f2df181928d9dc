from pdserve.v1 import cluster_pb2 as _cluster_pb2
from pdserve.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Frame(_message.Message):
    __slots__ = ("raw",)
    RAW_FIELD_NUMBER: _ClassVar[int]
    raw: bytes
    def __init__(self, raw: _Optional[bytes] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: _cluster_pb2.WorkerStatus
    def __init__(self, status: _Optional[_Union[_cluster_pb2.WorkerStatus, _Mapping]] = ...) -> None: ...

class MetricsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchVitalsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MetricsResponse(_message.Message):
    __slots__ = ("exposition",)
    EXPOSITION_FIELD_NUMBER: _ClassVar[int]
    exposition: bytes
    def __init__(self, exposition: _Optional[bytes] = ...) -> None: ...

class SequenceSpec(_message.Message):
    __slots__ = ("transfer_id", "epoch", "prompt_token_ids", "known_token_ids", "sampling", "stop", "output")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    epoch: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    known_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _generation_pb2.SamplingParams
    stop: _generation_pb2.StopConditions
    output: _generation_pb2.OutputOptions
    def __init__(self, transfer_id: _Optional[str] = ..., epoch: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., known_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., stop: _Optional[_Union[_generation_pb2.StopConditions, _Mapping]] = ..., output: _Optional[_Union[_generation_pb2.OutputOptions, _Mapping]] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("sequence", "router_id", "mode")
    class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        MODE_UNSPECIFIED: _ClassVar[ReserveRequest.Mode]
        MODE_RECEIVE_KV: _ClassVar[ReserveRequest.Mode]
        MODE_PREFILL_HERE: _ClassVar[ReserveRequest.Mode]
    MODE_UNSPECIFIED: ReserveRequest.Mode
    MODE_RECEIVE_KV: ReserveRequest.Mode
    MODE_PREFILL_HERE: ReserveRequest.Mode
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    sequence: SequenceSpec
    router_id: str
    mode: ReserveRequest.Mode
    def __init__(self, sequence: _Optional[_Union[SequenceSpec, _Mapping]] = ..., router_id: _Optional[str] = ..., mode: _Optional[_Union[ReserveRequest.Mode, str]] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("reservation", "load")
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    reservation: Reservation
    load: _cluster_pb2.WorkerLoad
    def __init__(self, reservation: _Optional[_Union[Reservation, _Mapping]] = ..., load: _Optional[_Union[_cluster_pb2.WorkerLoad, _Mapping]] = ...) -> None: ...

class Reservation(_message.Message):
    __slots__ = ("transfer_id", "epoch", "instance_id", "ways", "num_cached_blocks", "num_blocks", "lease_ms")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    WAYS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    epoch: int
    instance_id: str
    ways: _containers.RepeatedCompositeFieldContainer[Way]
    num_cached_blocks: int
    num_blocks: int
    lease_ms: int
    def __init__(self, transfer_id: _Optional[str] = ..., epoch: _Optional[int] = ..., instance_id: _Optional[str] = ..., ways: _Optional[_Iterable[_Union[Way, _Mapping]]] = ..., num_cached_blocks: _Optional[int] = ..., num_blocks: _Optional[int] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class Way(_message.Message):
    __slots__ = ("transport", "address", "nonce")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    transport: str
    address: str
    nonce: bytes
    def __init__(self, transport: _Optional[str] = ..., address: _Optional[str] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[SequenceKey]
    def __init__(self, keys: _Optional[_Iterable[_Union[SequenceKey, _Mapping]]] = ...) -> None: ...

class SequenceKey(_message.Message):
    __slots__ = ("transfer_id", "epoch")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    epoch: int
    def __init__(self, transfer_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("num_released",)
    NUM_RELEASED_FIELD_NUMBER: _ClassVar[int]
    num_released: int
    def __init__(self, num_released: _Optional[int] = ...) -> None: ...

class SubscribeRequest(_message.Message):
    __slots__ = ("router_id",)
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    def __init__(self, router_id: _Optional[str] = ...) -> None: ...

class StepOutput(_message.Message):
    __slots__ = ("tokens", "failed", "load")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[TokenOutput]
    failed: _containers.RepeatedCompositeFieldContainer[SequenceFailed]
    load: _cluster_pb2.WorkerLoad
    def __init__(self, tokens: _Optional[_Iterable[_Union[TokenOutput, _Mapping]]] = ..., failed: _Optional[_Iterable[_Union[SequenceFailed, _Mapping]]] = ..., load: _Optional[_Union[_cluster_pb2.WorkerLoad, _Mapping]] = ...) -> None: ...

class TokenOutput(_message.Message):
    __slots__ = ("transfer_id", "epoch", "position", "token_id", "logprobs", "finish_reason", "prefill", "was_drafted", "num_drafts", "handover")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    WAS_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    HANDOVER_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    epoch: int
    position: int
    token_id: int
    logprobs: _generation_pb2.PositionLogprobs
    finish_reason: _generation_pb2.FinishReason
    prefill: PrefillReport
    was_drafted: bool
    num_drafts: int
    handover: HandOver
    def __init__(self, transfer_id: _Optional[str] = ..., epoch: _Optional[int] = ..., position: _Optional[int] = ..., token_id: _Optional[int] = ..., logprobs: _Optional[_Union[_generation_pb2.PositionLogprobs, _Mapping]] = ..., finish_reason: _Optional[_Union[_generation_pb2.FinishReason, str]] = ..., prefill: _Optional[_Union[PrefillReport, _Mapping]] = ..., was_drafted: _Optional[bool] = ..., num_drafts: _Optional[int] = ..., handover: _Optional[_Union[HandOver, _Mapping]] = ...) -> None: ...

class HandOver(_message.Message):
    __slots__ = ("ready_ms", "first_step_ms")
    READY_MS_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_MS_FIELD_NUMBER: _ClassVar[int]
    ready_ms: float
    first_step_ms: float
    def __init__(self, ready_ms: _Optional[float] = ..., first_step_ms: _Optional[float] = ...) -> None: ...

class PrefillReport(_message.Message):
    __slots__ = ("cached_tokens", "queue_ms", "prefill_ms")
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    queue_ms: float
    prefill_ms: float
    def __init__(self, cached_tokens: _Optional[int] = ..., queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ...) -> None: ...

class SequenceFailed(_message.Message):
    __slots__ = ("transfer_id", "epoch", "code", "message", "reason")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    epoch: int
    code: int
    message: str
    reason: str
    def __init__(self, transfer_id: _Optional[str] = ..., epoch: _Optional[int] = ..., code: _Optional[int] = ..., message: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("sequence", "reservation")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    sequence: SequenceSpec
    reservation: Reservation
    def __init__(self, sequence: _Optional[_Union[SequenceSpec, _Mapping]] = ..., reservation: _Optional[_Union[Reservation, _Mapping]] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("first_token", "transfer_end")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_END_FIELD_NUMBER: _ClassVar[int]
    first_token: FirstToken
    transfer_end: TransferEnd
    def __init__(self, first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., transfer_end: _Optional[_Union[TransferEnd, _Mapping]] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("token", "load")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    token: TokenOutput
    load: _cluster_pb2.WorkerLoad
    def __init__(self, token: _Optional[_Union[TokenOutput, _Mapping]] = ..., load: _Optional[_Union[_cluster_pb2.WorkerLoad, _Mapping]] = ...) -> None: ...

class TransferEnd(_message.Message):
    __slots__ = ("transfer_ms", "transfer_bytes", "num_blocks", "load", "hidden_bytes")
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    transfer_ms: float
    transfer_bytes: int
    num_blocks: int
    load: _cluster_pb2.WorkerLoad
    hidden_bytes: int
    def __init__(self, transfer_ms: _Optional[float] = ..., transfer_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., load: _Optional[_Union[_cluster_pb2.WorkerLoad, _Mapping]] = ..., hidden_bytes: _Optional[int] = ...) -> None: ...
