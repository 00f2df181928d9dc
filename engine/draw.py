"""From scores to tokens, for many rows at once, on any device. `engine/native/sampling.py` does the same on
CPUs, fused.

Order: temperature, top-k, top-p of what is left, min-p, and argmax of what is left plus noise. Of equal
scores at a border all stay, so that no order of sorting can matter; nor does it matter which rows come
together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.noise import gumbel

Indices = npt.NDArray[np.intp]

# Nearly all nuclei lie among the tokens at most so far behind the best (log p); the rest cost a full sort.
_NUCLEUS_REACH = 10.0
# Below the first scores overflow, and at it the best token is drawn already; at the second all are alike.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e30
# More than any noise in float32 is wrong by (0.03, for the least there is).
_ROUGHNESS = 0.1
# Scores that a CPU handles at a time, so that they stay in its cache.
_TILE_SCORES = 1 << 18


@dataclass(frozen=True, slots=True)
class Wishes:
    """How R tokens are to be drawn. Arrays [R]."""

    rows: npt.NDArray[np.int64]  # where each one's scores lie
    temperatures: npt.NDArray[
        np.float32
    ]  # 0: greedy, and nothing else counts; else from MIN_ to MAX_TEMPERATURE
    top_k: npt.NDArray[np.int64]  # 0: no cut
    top_p: npt.NDArray[np.float64]  # 1: no cut
    min_p: npt.NDArray[np.float32]  # 0: no cut
    keys: npt.NDArray[np.int64]  # of the noise

    def of(self, which: Indices) -> Wishes:
        return Wishes(
            self.rows[which],
            self.temperatures[which],
            self.top_k[which],
            self.top_p[which],
            self.min_p[which],
            self.keys[which],
        )


def greedy_wishes(rows: Sequence[int]) -> Wishes:
    num = len(rows)
    return Wishes(
        rows=np.array(rows, np.int64),
        temperatures=np.zeros(num, np.float32),
        top_k=np.zeros(num, np.int64),
        top_p=np.ones(num, np.float64),
        min_p=np.zeros(num, np.float32),
        keys=np.zeros(num, np.int64),
    )


@dataclass(frozen=True, slots=True)
class Drawn:
    """Arrays [R]. What is not finite is no token: the model broke, or everything was banned."""

    token_ids: npt.NDArray[np.int64]
    is_finite: npt.NDArray[np.bool_]


def draw_tokens(scores: torch.Tensor, wishes: Wishes) -> Drawn:
    """scores [N, V] of any float dtype."""
    num = len(wishes.rows)
    drawn = Drawn(np.zeros(num, np.int64), np.zeros(num, np.bool_))
    is_greedy = wishes.temperatures == 0
    _take_best(scores, wishes, np.flatnonzero(is_greedy), drawn)
    sampled = np.flatnonzero(~is_greedy)
    tile = max(1, _TILE_SCORES // scores.shape[1]) if scores.device.type == "cpu" else max(1, num)
    for first in range(0, len(sampled), tile):
        _sample(scores, wishes, sampled[first : first + tile], drawn)
    return drawn


def _take_best(scores: torch.Tensor, wishes: Wishes, which: Indices, drawn: Drawn) -> None:
    """NaN counts as the largest, so a broken row shows."""
    if scores.device.type == "cpu":  # numpy is ten times as fast there
        for i in which.tolist():
            values = scores[wishes.rows[i]].float().numpy()
            drawn.token_ids[i] = values.argmax()
            drawn.is_finite[i] = np.isfinite(values[drawn.token_ids[i]])
    elif len(which):
        best, token_ids = scores[torch.from_numpy(wishes.rows[which]).to(scores.device)].max(-1)
        drawn.token_ids[which] = token_ids.numpy(force=True)
        drawn.is_finite[which] = best.isfinite().numpy(force=True)


def _sample(scores: torch.Tensor, wishes: Wishes, which: Indices, drawn: Drawn) -> None:
    device = scores.device
    wishes = wishes.of(which)
    temperatures = torch.from_numpy(wishes.temperatures).to(device)
    rows = torch.from_numpy(wishes.rows).to(device)
    scores = scores.index_select(0, rows).float() / temperatures[:, None]
    best = scores.amax(-1)
    is_finite = best.isfinite()
    if not is_finite.all():
        scores[~is_finite], best[~is_finite] = 0.0, 0.0
    border = _border(scores, best, wishes)
    keys = torch.from_numpy(wishes.keys).to(device)
    is_left = scores >= border[:, None]
    whole = border.isneginf().nonzero()[:, 0]
    if len(whole):
        is_left[whole] = _could_win(scores.index_select(0, whole), keys[whole])
    drawn.token_ids[which] = _perturbed_best(scores, is_left, keys).numpy(force=True)
    drawn.is_finite[which] = is_finite.numpy(force=True)


def _border(scores: torch.Tensor, best: torch.Tensor, wishes: Wishes) -> torch.Tensor:
    """[R]: the least score that is left in; -inf where nothing is cut."""
    border = torch.full_like(best, -torch.inf)
    has_top_k = np.flatnonzero((wishes.top_k > 0) & (wishes.top_k < scores.shape[1]))
    if len(has_top_k):
        rows = torch.from_numpy(has_top_k).to(best.device)
        border[rows] = _top_k_border(scores.index_select(0, rows), wishes.top_k[has_top_k])
    has_top_p = np.flatnonzero(wishes.top_p < 1)
    if len(has_top_p):
        rows = torch.from_numpy(has_top_p).to(best.device)
        top_p = torch.from_numpy(wishes.top_p[has_top_p]).to(best.device)
        border[rows] = _nucleus_border(scores.index_select(0, rows), best[rows], border[rows], top_p)
    return torch.maximum(border, best + torch.from_numpy(wishes.min_p).log().to(best.device))


def _top_k_border(scores: torch.Tensor, top_k: npt.NDArray[np.int64]) -> torch.Tensor:
    values = scores.topk(int(top_k.max())).values
    return values.gather(1, torch.from_numpy(top_k).to(scores.device)[:, None] - 1)[:, 0]


def _nucleus_border(
    scores: torch.Tensor, best: torch.Tensor, border: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """The least score inside the smallest set of best tokens that holds `top_p` of the mass of those from
    `border` on.
    """
    masses = (scores - best[:, None]).exp().masked_fill_(scores < border[:, None], 0.0)
    wanted = masses.sum(-1, dtype=torch.float64) * top_p
    for least in (math.exp(-_NUCLEUS_REACH), 0.0):
        candidates = _best_first(scores, masses > least)
        sorted_masses = (candidates - best[:, None]).exp()
        num_before = (sorted_masses.double().cumsum(-1) < wanted[:, None]).sum(-1)
        num_left = sorted_masses.count_nonzero(-1)
        if bool((num_before < num_left).all()):
            break
    # Rounded sums can fall short of what is wanted: then the last of all is the border.
    last = num_before.minimum(num_left - 1)
    return torch.maximum(border, candidates.gather(1, last[:, None])[:, 0])


def _best_first(scores: torch.Tensor, is_left: torch.Tensor) -> torch.Tensor:
    """[R, the most of a row]: what is left of each row, the best ones first, padded with -inf."""
    rows, token_ids = _cells(is_left)
    counts = rows.bincount(minlength=len(scores))
    places = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    padded = scores.new_full((len(scores), int(counts.max())), -torch.inf)
    padded[rows, places] = scores[rows, token_ids]
    return padded.sort(-1, descending=True).values


def _could_win(scores: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[R, V], where nothing is cut: all tokens that float32 cannot tell from the best one."""
    token_ids = torch.arange(scores.shape[1], device=scores.device)
    rough = gumbel(keys[:, None], token_ids, torch.float32).add_(scores)
    best = rough.amax(-1, keepdim=True)
    return rough >= best - (_ROUGHNESS + best.abs() * 1e-6)


def _perturbed_best(scores: torch.Tensor, is_left: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[R]: of what is left, the token with the best score and noise, the first of equal ones."""
    rows, token_ids = _cells(is_left)
    perturbed = scores[rows, token_ids] + gumbel(keys[rows], token_ids)
    best = perturbed.new_full((len(scores),), -torch.inf).scatter_reduce_(0, rows, perturbed, "amax")
    is_best = perturbed == best[rows]
    winners = token_ids.new_full((len(scores),), scores.shape[1])
    return winners.scatter_reduce_(0, rows[is_best], token_ids[is_best], "amin")


def _cells(is_left: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and token ids of what is True in [R, V], row by row."""
    if is_left.device.type == "cpu":  # numpy finds them several times as fast
        cells = torch.from_numpy(np.flatnonzero(is_left.numpy()))
    else:
        cells = is_left.flatten().nonzero()[:, 0]
    return cells // is_left.shape[1], cells % is_left.shape[1]
