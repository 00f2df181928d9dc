"""Where a sequence ends: one rule for every token, the first included."""

from __future__ import annotations

from engine.sampling import FinishReason, StopConditions


def finish_reason(
    stop: StopConditions, eos_token_ids: frozenset[int], token_id: int, num_output_tokens: int
) -> FinishReason | None:
    """Why `token_id`, the last of `num_output_tokens` output tokens, ends the sequence, if it does."""
    if num_output_tokens > stop.min_tokens:
        if token_id in eos_token_ids and not stop.ignore_eos:
            return FinishReason.EOS
        if token_id in stop.stop_token_ids:
            return FinishReason.STOP
    return FinishReason.LENGTH if num_output_tokens >= stop.max_tokens else None


def banned_token_ids(
    stop: StopConditions, eos_token_ids: frozenset[int], num_output_tokens: int
) -> frozenset[int]:
    """What cannot be drawn behind `num_output_tokens` output tokens: too early an end."""
    if num_output_tokens >= stop.min_tokens:
        return frozenset()
    return stop.stop_token_ids if stop.ignore_eos else stop.stop_token_ids | eos_token_ids
