"""From logits to tokens, for all rows of a step at once. Arithmetic in float32, whatever the model's dtype.

Order: logit bias and penalties, bans (min_tokens), then for rows with a temperature: temperature, top-k,
top-p, min-p, and argmax of what is left plus noise. Greedy rows cost no noise and no sorting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.noise import gumbel, noise_key
from engine.sampling import PositionLogprobs, SamplingParams, TokenLogprob

# Most nuclei are found among the few best tokens, nearly all among the next; the rest cost a full sort.
_NUCLEUS_GUESSES = (256, 8192)
# Below it scores overflow; at it the best token is drawn already.
_MIN_TEMPERATURE = 1e-6


@dataclass(frozen=True, slots=True)
class SampleRow:
    params: SamplingParams
    position: int  # index in the output of the token to draw
    banned_token_ids: frozenset[int]
    prompt_token_ids: Sequence[int]
    # Token id → how often it was drawn; empty where no penalty asks.
    output_counts: dict[int, int]


@dataclass(frozen=True, slots=True)
class Sampled:
    """`token_id` is None where no finite score was left: the model broke, or everything was banned."""

    token_id: int | None
    logprobs: PositionLogprobs | None


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
    """logits [R, V] → one token for each row."""
    if not rows:
        return []
    scores = logits.to(torch.float32, copy=True)
    logprobs = _logprobs(scores, rows)
    for score, row in zip(scores, rows, strict=True):
        _adjust(score, row)
    drawing = [i for i, row in enumerate(rows) if not row.params.is_greedy]
    if drawing:
        index = torch.tensor(drawing, device=scores.device)
        scores[index] = _perturb(scores[index], [rows[i] for i in drawing])
    best, token_ids = scores.max(dim=-1)  # NaN wins a max, so a broken row shows here
    chosen = zip(token_ids.tolist(), best.isfinite().tolist(), strict=True)
    return [
        Sampled(token_id, _position_logprobs(logprobs, i, rows[i], token_id))
        if is_finite
        else Sampled(None, None)
        for i, (token_id, is_finite) in enumerate(chosen)
    ]


def _adjust(score: torch.Tensor, row: SampleRow) -> None:
    """Bias, penalties and bans on one row [V], in place."""
    params = row.params
    device = score.device
    if params.logit_bias:
        ids = torch.tensor([token_id for token_id, _ in params.logit_bias], device=device)
        score[ids] += torch.tensor([bias for _, bias in params.logit_bias], device=device)
    if params.repetition_penalty != 1.0:
        ids = torch.tensor(sorted({*row.prompt_token_ids, *row.output_counts}), device=device)
        seen = score[ids]
        score[ids] = torch.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
    if row.output_counts and (params.presence_penalty or params.frequency_penalty):
        ids = torch.tensor(list(row.output_counts), device=device)
        counts = torch.tensor(list(row.output_counts.values()), dtype=torch.float32, device=device)
        score[ids] -= params.presence_penalty + params.frequency_penalty * counts
    if row.banned_token_ids:
        score[torch.tensor(sorted(row.banned_token_ids), device=device)] = -torch.inf


def _perturb(scores: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Temperature, cuts and noise on [R, V]."""
    device = scores.device
    temperatures = [[max(row.params.temperature, _MIN_TEMPERATURE)] for row in rows]
    scores = scores / torch.tensor(temperatures, device=device)
    for i, row in enumerate(rows):
        _cut(scores[i], row.params)
    keys = torch.tensor([[noise_key(row.params.seed, row.position)] for row in rows], device=device)
    return scores + gumbel(keys, torch.arange(scores.shape[1], device=device)[None])


def _cut(score: torch.Tensor, params: SamplingParams) -> None:
    """top-k, then top-p of what is left, then min-p, on one row [V] in place. Ties at a border all stay,
    so that no order of sorting can matter.
    """
    if params.top_k is not None and params.top_k < score.shape[0]:
        score.masked_fill_(score < score.topk(params.top_k).values[-1], -torch.inf)
    if params.top_p < 1.0:
        probs = torch.softmax(score, 0)
        score.masked_fill_(probs < _nucleus_border(probs, params.top_p), -torch.inf)
    if params.min_p > 0.0:
        probs = torch.softmax(score, 0)
        score.masked_fill_(probs < params.min_p * probs.max(), -torch.inf)


def _nucleus_border(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """The smallest probability inside the smallest set of best tokens that holds `top_p` of the mass."""
    vocab_size = probs.shape[0]
    for size in (*(guess for guess in _NUCLEUS_GUESSES if guess < vocab_size), vocab_size):
        best = probs.topk(size).values
        mass_before = best.cumsum(0) - best
        inside = best[mass_before < top_p]
        if len(inside) < size:
            break
    return inside[-1] if len(inside) else best[0]


def _logprobs(scores: torch.Tensor, rows: Sequence[SampleRow]) -> dict[int, torch.Tensor]:
    """Row → log p of every token under the model's own distribution, where asked for."""
    asking = [i for i, row in enumerate(rows) if row.params.num_logprobs is not None]
    if not asking:
        return {}
    return dict(zip(asking, torch.log_softmax(scores[asking], -1), strict=True))


def _position_logprobs(
    logprobs: dict[int, torch.Tensor], index: int, row: SampleRow, token_id: int
) -> PositionLogprobs | None:
    num_logprobs = row.params.num_logprobs
    if num_logprobs is None:
        return None
    values = logprobs[index]
    best = values.topk(min(num_logprobs, values.shape[0]))
    top = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return PositionLogprobs(
        chosen=TokenLogprob(token_id, float(values[token_id])),
        top=tuple(TokenLogprob(i, value) for i, value in top),
    )
