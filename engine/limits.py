"""What one engine can take at all: fixed from its start, and checked before anything is queued."""

from __future__ import annotations

from collections.abc import Sequence

from engine.config import DEFAULT_KV_CACHE_BYTES, EngineConfig
from engine.errors import CannotFit, ModelError
from engine.layout import KVLayout
from engine.loading import LoadedModel
from engine.request import EngineLimits, NewToken, SequenceRequest


def engine_limits(model: LoadedModel, config: EngineConfig, layout: KVLayout) -> EngineLimits:
    num_blocks = config.num_blocks or (config.kv_cache or DEFAULT_KV_CACHE_BYTES) // layout.block_bytes
    if num_blocks == 0:
        raise ModelError(f"kv_cache is smaller than one block of {layout.block_bytes} bytes")
    max_model_len = min(model.max_model_len, config.max_model_len or model.max_model_len)
    return EngineLimits(
        max_model_len=max_model_len,
        block_size=config.block_size,
        max_num_seqs=min(config.max_num_seqs, config.max_num_batched_tokens),
        num_blocks=num_blocks,
        max_sequence_tokens=min(max_model_len, num_blocks * config.block_size),
        vocab_size=model.vocab_size,
    )


def check_fits(limits: EngineLimits, token_ids: Sequence[int], max_new_tokens: int) -> None:
    """CannotFit if a sequence of `token_ids` that draws up to `max_new_tokens` more can never run."""
    if not token_ids:
        raise CannotFit("the prompt is empty")
    if max_new_tokens < 1:
        raise CannotFit("no token is left to draw: max_tokens is reached")
    total = len(token_ids) + max_new_tokens
    if total > limits.max_sequence_tokens:
        raise CannotFit(
            f"prompt and output of {total} tokens: at most {limits.max_sequence_tokens} fit here "
            f"(context {limits.max_model_len}, {limits.num_blocks} blocks of {limits.block_size})"
        )
    if min(token_ids) < 0 or max(token_ids) >= limits.vocab_size:
        raise CannotFit(f"a token id is outside the vocabulary of {limits.vocab_size}")


def check_named_ids(limits: EngineLimits, request: SequenceRequest) -> None:
    """CannotFit if sampling or stopping names a token that there is not: it would fail a whole step."""
    ids = [*request.stop.stop_token_ids, *(token_id for token_id, _ in request.sampling.logit_bias)]
    if ids and (min(ids) < 0 or max(ids) >= limits.vocab_size):
        raise CannotFit(f"a stop or bias id is outside the vocabulary of {limits.vocab_size}")


def is_known_token(limits: EngineLimits, token: NewToken) -> bool:
    """Whether a token that was drawn elsewhere, and what is said of its rivals, is in the vocabulary."""
    ids = [token.token_id]
    if token.logprobs is not None:
        ids += [each.token_id for each in (token.logprobs.chosen, *token.logprobs.top)]
    return min(ids) >= 0 and max(ids) < limits.vocab_size
