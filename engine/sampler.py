"""From logits to tokens, for all rows of a step at once. Arithmetic in float32 at least, whatever the model's
dtype.

Order: logit bias and penalties, bans (min_tokens) and grammars, then the draw (`engine/draw.py`). Only rows
with one of the former are copied; all others are drawn from the logits as they come, and a greedy one costs
its argmax.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.draw import MAX_TEMPERATURE, MIN_TEMPERATURE, Drawn, Wishes, draw_tokens, greedy_wishes
from engine.grammar import Mask
from engine.noise import noise_keys
from engine.sampling import PositionLogprobs, SamplingParams, TokenLogprob
from engine.seen_tokens import SeenTokens

# Scores of adjusted rows that a CPU copies at a time.
_COPIED_SCORES = 1 << 19
# [256, 8]: what each byte of a mask adds to its tokens' scores, 0 or -inf.
_PENALTIES = torch.from_numpy(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(np.float32)
).log()
Draw = Callable[[torch.Tensor, Wishes], Drawn]


@dataclass(frozen=True, slots=True)
class SampleRow:
    params: SamplingParams
    position: int  # index in the output of the token to draw
    banned_token_ids: frozenset[int] = frozenset()
    seen: SeenTokens | None = None  # where a penalty asks
    mask: Mask | None = None  # what may be drawn, bans considered; all rows of a step have one length

    @property
    def is_adjusted(self) -> bool:
        """Its scores are not the logits as they come."""
        is_steered = self.seen is not None or self.mask is not None
        return is_steered or bool(self.banned_token_ids or self.params.logit_bias)


# Takes the best token at any position: what most rows are, made once.
GREEDY = SampleRow(SamplingParams(), 0)


class Sampled(NamedTuple):
    """`token_id` is None where no finite score was left: the model broke, or everything was banned."""

    token_id: int | None
    logprobs: PositionLogprobs | None


def sample(logits: torch.Tensor, rows: Sequence[SampleRow], draw: Draw = draw_tokens) -> list[Sampled]:
    """logits [R, V] → one token for each row."""
    wishing = [i for i, row in enumerate(rows) if row is not GREEDY]
    wishes = _wishes(rows, [i for i in wishing if not rows[i].params.is_greedy])
    adjusted = [i for i in wishing if rows[i].is_adjusted]
    drawn = _draw_adjusted(logits, rows, wishes, adjusted, draw) if adjusted else draw(logits, wishes)
    token_ids: list[int | None] = drawn.token_ids.tolist()
    for i in np.flatnonzero(~drawn.is_finite).tolist():
        token_ids[i] = None
    sampled = [Sampled(token_id, None) for token_id in token_ids]
    for i, logprobs in _logprobs(logits, rows, wishing, token_ids):
        sampled[i] = Sampled(token_ids[i], logprobs)
    return sampled


def _wishes(rows: Sequence[SampleRow], sampled: Sequence[int]) -> Wishes:
    """`sampled`: those that are not greedy."""
    wishes = greedy_wishes(range(len(rows)))
    if sampled:
        params = [rows[i].params for i in sampled]
        temperatures = np.array([each.temperature for each in params])
        wishes.temperatures[sampled] = temperatures.clip(MIN_TEMPERATURE, MAX_TEMPERATURE)
        wishes.top_k[sampled] = [each.top_k or 0 for each in params]
        wishes.top_p[sampled] = [each.top_p for each in params]
        wishes.min_p[sampled] = [each.min_p for each in params]
        wishes.keys[sampled] = noise_keys([each.seed for each in params], [rows[i].position for i in sampled])
    return wishes


def _draw_adjusted(
    logits: torch.Tensor, rows: Sequence[SampleRow], wishes: Wishes, adjusted: list[int], draw: Draw
) -> Drawn:
    """Draws the `adjusted` rows from copies of their scores: a few at a time, which stay in a cache."""
    drawn = Drawn(np.zeros(len(rows), np.int64), np.zeros(len(rows), np.bool_))
    others = np.setdiff1d(wishes.rows, adjusted)
    _keep(drawn, others, draw(logits, wishes.of(others)))
    num = max(1, _COPIED_SCORES // logits.shape[1]) if logits.device.type == "cpu" else len(adjusted)
    for first in range(0, len(adjusted), num):
        which = adjusted[first : first + num]
        scores = _rows(logits, which)
        _adjust(scores, [rows[i] for i in which])
        wanted = replace(wishes.of(np.array(which)), rows=np.arange(len(which)))
        _keep(drawn, which, draw(scores, wanted))
    return drawn


def _keep(drawn: Drawn, which: npt.NDArray[np.int64] | list[int], part: Drawn) -> None:
    drawn.token_ids[which] = part.token_ids
    drawn.is_finite[which] = part.is_finite


def _adjust(scores: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """Bias, penalties, bans and masks on scores [R, V], in place."""
    biases = [row.params.logit_bias for row in rows]
    at = _cells(scores, [[token_id for token_id, _ in each] for each in biases])
    scores[at] += scores.new_tensor([bias for each in biases for _, bias in each])
    _penalise(scores, [(i, row.params, row.seen) for i, row in enumerate(rows) if row.seen is not None])
    scores[_cells(scores, [row.banned_token_ids for row in rows])] = -torch.inf
    _mask(scores, [(i, row.mask) for i, row in enumerate(rows) if row.mask is not None])


def _mask(scores: torch.Tensor, masks: Sequence[tuple[int, Mask]]) -> None:
    """Eight tokens at a time, whatever they are: a test of each takes ten times as long."""
    if not masks:
        return
    device = scores.device
    packed = torch.from_numpy(np.stack([mask for _, mask in masks])).to(device)
    penalties = _PENALTIES.to(device).index_select(0, packed.flatten().int()).view(len(masks), -1)
    rows = torch.tensor([i for i, _ in masks], device=device)
    scores.index_add_(0, rows, penalties[:, : scores.shape[1]])


def _penalise(scores: torch.Tensor, rows: Sequence[tuple[int, SamplingParams, SeenTokens]]) -> None:
    if not rows:
        return
    num_seen = [len(seen.token_ids) for _, _, seen in rows]

    def spread(values: list[float]) -> torch.Tensor:
        """One value a row → one a token seen."""
        return torch.from_numpy(np.repeat(np.array(values, np.float32), num_seen)).to(scores.device)

    columns = torch.from_numpy(np.concatenate([seen.token_ids for _, _, seen in rows])).to(scores.device)
    counts = torch.from_numpy(np.concatenate([seen.counts for _, _, seen in rows])).to(scores.device)
    at = (spread([i for i, _, _ in rows]).long(), columns)
    repetition = spread([params.repetition_penalty for _, params, _ in rows])
    presence = spread([params.presence_penalty for _, params, _ in rows])
    frequency = spread([params.frequency_penalty for _, params, _ in rows])
    values = scores[at]
    values = torch.where(values > 0, values / repetition, values * repetition)
    scores[at] = values - (presence * (counts > 0) + frequency * counts)


def _cells(scores: torch.Tensor, token_ids: Sequence[Collection[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The indices of each row's `token_ids` in scores [R, V]."""
    rows = torch.tensor([i for i, ids in enumerate(token_ids) for _ in ids], dtype=torch.long)
    columns = torch.tensor([token_id for ids in token_ids for token_id in ids], dtype=torch.long)
    return rows.to(scores.device), columns.to(scores.device)


def _logprobs(
    logits: torch.Tensor, rows: Sequence[SampleRow], wishing: Sequence[int], token_ids: Sequence[int | None]
) -> Iterator[tuple[int, PositionLogprobs]]:
    """Each row that asks for them, and log p under the model's own distribution."""
    asking = [i for i in wishing if rows[i].params.num_logprobs is not None]
    if not asking:
        return
    scores = _rows(logits, asking)
    totals = scores.logsumexp(-1, keepdim=True)
    wanted = [rows[i].params.num_logprobs or 0 for i in asking]
    best = scores.topk(min(max(wanted), scores.shape[1]))
    best_logprobs = (best.values - totals).tolist()
    for i, num, own, total, ids, top in zip(
        asking, wanted, scores, totals, best.indices.tolist(), best_logprobs, strict=True
    ):
        token_id = token_ids[i]
        if token_id is not None:
            pairs = tuple(TokenLogprob(*pair) for pair in zip(ids[:num], top[:num], strict=True))
            yield i, PositionLogprobs(TokenLogprob(token_id, float(own[token_id] - total)), pairs)


def _rows(logits: torch.Tensor, which: Sequence[int]) -> torch.Tensor:
    """A copy in float32."""
    return logits.index_select(0, torch.tensor(which, device=logits.device)).float()
