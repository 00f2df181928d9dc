"""protobuf ↔ plain values, for what both roles speak. Nothing behind `service.py` sees a protobuf."""

from __future__ import annotations

import math

from engine.grammar import Grammar
from engine.layout import KVLayout
from engine.request import EngineLimits, EngineLoad, NewToken, PrefillReport, SequenceRequest, Until
from engine.sampling import FinishReason, PositionLogprobs, SamplingParams, StopConditions, TokenLogprob
from kv_transfer.frame import TransferKey
from kv_transfer.handover import HandOver
from kv_transfer.transfer import PushTarget
from kv_transfer.ways import Way
from pdserve.v1 import cluster_pb2, generation_pb2, worker_pb2
from pdserve.v1.errors import InvalidArgument
from worker.identity import Role

_REASONS = {
    FinishReason.EOS: generation_pb2.FINISH_REASON_EOS,
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
}
ROLES = {
    Role.PREFILL: cluster_pb2.ROLE_PREFILL,
    Role.DECODE: cluster_pb2.ROLE_DECODE,
    Role.COLOCATED: cluster_pb2.ROLE_COLOCATED,
}
# A sequence is known by its key's name, which is cut behind so many.
_MAX_TRANSFER_ID = 64


def transfer_key(transfer_id: str, epoch: int) -> TransferKey:
    if not 0 < len(transfer_id) <= _MAX_TRANSFER_ID:
        raise InvalidArgument(f"a transfer_id has 1 to {_MAX_TRANSFER_ID} characters")
    return TransferKey(transfer_id, epoch)


def sequence_request(
    spec: worker_pb2.SequenceSpec,
    until: Until = Until.FINISH,
    hold_blocks: bool = False,
    grammar: Grammar | None = None,
) -> SequenceRequest:
    """`grammar`: the one that the spec names. Raises InvalidArgument for what a router would never send."""
    if not spec.prompt_token_ids:
        raise InvalidArgument("the prompt is empty")
    key = transfer_key(spec.transfer_id, spec.epoch)
    return SequenceRequest(
        sequence_id=str(key),
        prompt_token_ids=tuple(spec.prompt_token_ids),
        known_token_ids=tuple(spec.known_token_ids),
        sampling=_sampling(spec.sampling, spec.output),
        stop=_stop(spec.stop),
        until=until,
        hold_blocks=hold_blocks,
        grammar=grammar,
    )


def _sampling(params: generation_pb2.SamplingParams, output: generation_pb2.OutputOptions) -> SamplingParams:
    if not params.HasField("seed"):
        raise InvalidArgument("a sequence needs a seed")
    sampling = SamplingParams(
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_k=params.top_k or None,
        top_p=params.top_p if params.HasField("top_p") else 1.0,
        min_p=params.min_p,
        seed=params.seed,
        repetition_penalty=params.repetition_penalty if params.HasField("repetition_penalty") else 1.0,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=tuple(sorted(params.logit_bias.items())),
        num_logprobs=output.logprobs if output.HasField("logprobs") else None,
    )
    _check_sampling(sampling)
    return sampling


def _check_sampling(sampling: SamplingParams) -> None:
    """One row that cannot be computed would fail its step, and with it the sequences of others."""
    is_sound = (
        0 <= sampling.temperature < math.inf
        and (sampling.top_k or 0) >= 0
        and 0 < sampling.top_p <= 1
        and 0 <= sampling.min_p <= 1
        and 0 < sampling.repetition_penalty < math.inf
        and math.isfinite(sampling.presence_penalty + sampling.frequency_penalty)
        and all(math.isfinite(bias) for _, bias in sampling.logit_bias)
    )
    if not is_sound:
        raise InvalidArgument(f"no router lets such sampling parameters through: {sampling}")


def _stop(stop: generation_pb2.StopConditions) -> StopConditions:
    if stop.max_tokens < 1:
        raise InvalidArgument("a sequence needs max_tokens")
    return StopConditions(
        max_tokens=stop.max_tokens,
        min_tokens=stop.min_tokens,
        stop_token_ids=frozenset(stop.stop_token_ids),
        ignore_eos=stop.ignore_eos,
    )


def token_output(
    key: TransferKey,
    token: NewToken,
    finish_reason: FinishReason | None = None,
    prefill: PrefillReport | None = None,
    num_drafts: int = 0,
    handover: HandOver | None = None,
) -> worker_pb2.TokenOutput:
    message = worker_pb2.TokenOutput()
    write_token(message, key, token, finish_reason, prefill, num_drafts, handover)
    return message


def write_token(
    message: worker_pb2.TokenOutput,
    key: TransferKey,
    token: NewToken,
    finish_reason: FinishReason | None,
    prefill: PrefillReport | None,
    num_drafts: int,
    handover: HandOver | None,
) -> None:
    """Into a message that is empty."""
    message.transfer_id = key.transfer_id
    message.epoch = key.epoch
    message.position = token.position
    message.token_id = token.token_id
    if token.was_drafted:
        message.was_drafted = True
    if num_drafts:
        message.num_drafts = num_drafts
    if token.logprobs is not None:
        message.logprobs.CopyFrom(_logprobs(token.logprobs))
    if finish_reason is not None:
        message.finish_reason = _REASONS[finish_reason]
    if prefill is not None:
        message.prefill.cached_tokens = prefill.cached_tokens
        message.prefill.queue_ms = prefill.queue_ms
        message.prefill.prefill_ms = prefill.prefill_ms
    if handover is not None:
        message.handover.ready_ms = handover.ready_ms
        message.handover.first_step_ms = handover.first_step_ms


def _logprobs(logprobs: PositionLogprobs) -> generation_pb2.PositionLogprobs:
    return generation_pb2.PositionLogprobs(
        chosen=_logprob(logprobs.chosen), top=[_logprob(pair) for pair in logprobs.top]
    )


def _logprob(pair: TokenLogprob) -> generation_pb2.TokenLogprob:
    return generation_pb2.TokenLogprob(token_id=pair.token_id, logprob=pair.logprob)


def worker_load(
    load: EngineLoad, num_reservations: int = 0, num_transfers: int = 0
) -> cluster_pb2.WorkerLoad:
    return cluster_pb2.WorkerLoad(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        queued_prompt_tokens=load.queued_prompt_tokens,
        kv_blocks_free=load.blocks_free,
        kv_blocks_used=load.blocks_used,
        num_reservations=num_reservations,
        num_transfers=num_transfers,
        kv_blocks_quarantined=load.blocks_quarantined,
    )


def worker_limits(limits: EngineLimits, layout: KVLayout, num_threads: int) -> cluster_pb2.WorkerLimits:
    return cluster_pb2.WorkerLimits(
        num_threads=num_threads,
        max_model_len=limits.max_model_len,
        block_size=limits.block_size,
        max_num_seqs=limits.max_num_seqs,
        kv_blocks_total=limits.num_blocks,
        max_sequence_tokens=limits.max_sequence_tokens,
        layout=cluster_pb2.KVLayout(
            num_layers=layout.num_layers,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            block_size=layout.block_size,
            dtype=layout.dtype,
            model_fingerprint=layout.model_fingerprint,
        ),
    )


def reservation_message(target: PushTarget) -> worker_pb2.Reservation:
    return worker_pb2.Reservation(
        transfer_id=target.key.transfer_id,
        epoch=target.key.epoch,
        instance_id=target.instance_id,
        ways=[_way_message(way) for way in target.ways],
        num_cached_blocks=target.num_cached_blocks,
        num_blocks=target.num_blocks,
        lease_ms=round(target.lease_s * 1000),
    )


def push_target(message: worker_pb2.Reservation) -> PushTarget:
    if message.num_cached_blocks > message.num_blocks or message.lease_ms == 0 or not message.ways:
        raise InvalidArgument("the reservation contradicts itself")
    return PushTarget(
        key=transfer_key(message.transfer_id, message.epoch),
        instance_id=message.instance_id,
        ways=tuple(_way(way) for way in message.ways),
        num_cached_blocks=message.num_cached_blocks,
        num_blocks=message.num_blocks,
        lease_s=message.lease_ms / 1000,
    )


def _way_message(way: Way) -> worker_pb2.Way:
    return worker_pb2.Way(transport=way.transport, address=way.address, nonce=way.nonce)


def _way(message: worker_pb2.Way) -> Way:
    nonce = message.nonce if message.HasField("nonce") else None
    return Way(message.transport, message.address, nonce)
