"""What a chunk draws: its rows for the sampler, and which of the draws count."""

from __future__ import annotations

from collections.abc import Sequence

from engine.chunk import Chunk
from engine.grammar import without
from engine.request import NewToken
from engine.sampler import GREEDY, Sampled, SampleRow
from engine.sampling import FinishReason
from engine.stopping import banned_token_ids, finish_reason


def sample_rows(chunk: Chunk, eos_token_ids: frozenset[int]) -> list[SampleRow]:
    """One for each draw. Behind a draft all is as if it were there already."""
    sequence = chunk.sequence
    params, stop = sequence.request.sampling, sequence.request.stop
    first = sequence.num_output_tokens
    if sequence.is_plain and first >= stop.min_tokens:
        return [GREEDY] * chunk.num_draws
    rows: list[SampleRow] = []
    seen = sequence.seen
    matcher = sequence.matcher
    masks = matcher.masks(chunk.drafts) if matcher is not None and chunk.num_draws else None
    for index in range(chunk.num_draws):
        if index > 0 and seen is not None:
            seen = seen.and_one(chunk.drafts[index - 1])
        banned = banned_token_ids(stop, eos_token_ids, first + index, masks is not None)
        if masks is None:
            rows.append(SampleRow(params, first + index, banned, seen))
        else:
            rows.append(SampleRow(params, first + index, seen=seen, mask=without(masks[index], banned)))
    return rows


def take_draws(
    chunk: Chunk, draws: Sequence[Sampled], eos_token_ids: frozenset[int]
) -> tuple[tuple[NewToken, ...], FinishReason | None]:
    """Gives the sequence its new tokens, up to the first that is not what was drafted or that ends it."""
    sequence, drafts = chunk.sequence, chunk.drafts
    tokens: list[NewToken] = []
    reason: FinishReason | None = None
    position = sequence.num_output_tokens
    for index, (token_id, logprobs) in enumerate(draws):
        if token_id is None:
            break  # behind a draft: the next step draws it alone, and tells
        was_drafted = index < len(drafts) and token_id == drafts[index]
        tokens.append(NewToken(position, token_id, logprobs, was_drafted))
        sequence.append(token_id)
        position += 1
        reason = finish_reason(
            sequence.request.stop, eos_token_ids, token_id, position, sequence.matcher is not None
        )
        if reason is not None or not was_drafted:
            break
    return tuple(tokens), reason
