"""Where a sequence ends: one rule for every token, the first included."""

from __future__ import annotations

from engine.sampling import FinishReason, StopConditions


def finish_reason(
    stop: StopConditions,
    eos_token_ids: frozenset[int],
    token_id: int,
    num_output_tokens: int,
    has_grammar: bool = False,
) -> FinishReason | None:
    """Why `token_id`, the last of `num_output_tokens` output tokens, ends the sequence, if it does. With a
    grammar EOS always does: too early, it is drawn only where nothing else is left to say.
    """
    if has_grammar and token_id in eos_token_ids:
        return FinishReason.EOS
    if num_output_tokens > stop.min_tokens:
        if token_id in eos_token_ids and not stop.ignore_eos:
            return FinishReason.EOS
        if token_id in stop.stop_token_ids:
            return FinishReason.STOP
    return FinishReason.LENGTH if num_output_tokens >= stop.max_tokens else None


def banned_token_ids(
    stop: StopConditions,
    eos_token_ids: frozenset[int],
    num_output_tokens: int,
    has_grammar: bool = False,
) -> frozenset[int]:
    """What cannot be drawn behind `num_output_tokens` output tokens: too early an end. With a grammar this
    is a wish: nothing may be left but to end.
    """
    is_early = num_output_tokens < stop.min_tokens
    banned = stop.stop_token_ids if is_early else frozenset()
    # Where EOS is ignored it may come at any time, but a grammar could go on no further.
    is_eos_banned = has_grammar if stop.ignore_eos else is_early
    return banned | eos_token_ids if is_eos_banned else banned
