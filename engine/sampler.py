"""From logits to tokens, for all rows of a step at once. Arithmetic in float32, whatever the model's dtype.

Order: logit bias and penalties, bans (min_tokens), then for rows with a temperature: temperature, top-k,
top-p, min-p, and argmax of what is left plus noise. Greedy rows cost no noise and no sorting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.noise import gumbel, noise_key
from engine.sampling import PositionLogprobs, SamplingParams, TokenLogprob

# Nearly all nuclei lie among the tokens at most so far behind the best (log p); the rest cost a full sort.
_NUCLEUS_REACH = 10.0
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
        if not row.params.is_greedy:
            _perturb(score, row)
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


def _perturb(score: torch.Tensor, row: SampleRow) -> None:
    """Temperature, cuts and noise on one row [V], in place. Noise is what a draw costs: a cut row's is made
    for what is left of it only.
    """
    params = row.params
    score /= max(params.temperature, _MIN_TEMPERATURE)
    key = torch.tensor(noise_key(params.seed, row.position), device=score.device)
    border = _border(score, params)
    if border is None:
        score += gumbel(key, torch.arange(score.shape[0], device=score.device))
        return
    token_ids = _left(score, border).nonzero().flatten()
    perturbed = score[token_ids] + gumbel(key, token_ids)
    score.fill_(-torch.inf)
    score[token_ids] = perturbed


def _border(score: torch.Tensor, params: SamplingParams) -> torch.Tensor | None:
    """The least score that top-k, then top-p of what is left, then min-p leave in; None where nothing is
    cut. Ties at a border all stay, so that no order of sorting can matter.
    """
    borders: list[torch.Tensor] = []
    if params.top_k is not None and params.top_k < score.shape[0]:
        borders.append(score.topk(params.top_k).values[-1])
    if params.top_p < 1.0:
        borders.append(_nucleus_border(score[_left(score, borders[0])] if borders else score, params.top_p))
    if params.min_p > 0.0:
        borders.append(score.max() + math.log(params.min_p))
    return torch.stack(borders).max() if borders else None


def _left(score: torch.Tensor, border: torch.Tensor) -> torch.Tensor:
    """NaN stays in, so that a broken row shows."""
    return (score < border).logical_not_()


def _nucleus_border(score: torch.Tensor, top_p: float) -> torch.Tensor:
    """The least score inside the smallest set of best tokens that holds `top_p` of the mass."""
    total = score.logsumexp(0)
    for candidates in (score[_left(score, score.max() - _NUCLEUS_REACH)], score):
        best = candidates.sort(descending=True).values
        mass = (best - total).exp()
        inside = best[mass.cumsum(0) - mass < top_p]
        if len(inside) < len(best):
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
