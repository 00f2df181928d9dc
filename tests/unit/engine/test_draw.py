"""Draws by torch and by our kernel, beside the slow rules: every cut, ties, and what must not matter."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine.draw import Drawn, Wishes, draw_tokens, greedy_wishes
from engine.native.sampling import native_draw
from engine.noise import gumbel, noise_keys
from pdserve.requests import GenerateOptions
from tests.reference_sampler import BORDER, next_scores
from tests.unit.engine.driving import TIE
from tests.unit.engine.native.kernels import library_or_skip

Draw = Callable[[torch.Tensor, Wishes], Drawn]
KINDS: list[GenerateOptions] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 3.0},
    {"temperature": 0.9, "top_k": 1},
    {"temperature": 1.5, "top_k": 17},
    {"temperature": 1.5, "top_k": 600},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 2.5, "top_p": 0.999},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1.0, "min_p": 0.02},
    {"temperature": 1.3, "top_k": 60, "top_p": 0.7, "min_p": 0.01},
]


@pytest.fixture(params=["torch", "kernel"])
def draw(request: pytest.FixtureRequest) -> Draw:
    return draw_tokens if request.param == "torch" else native_draw(library_or_skip())


def wishes_for(kinds: list[GenerateOptions], seeds: list[int] | None = None) -> Wishes:
    seeds = seeds or list(range(len(kinds)))
    wishes = greedy_wishes(range(len(kinds)))
    wishes.temperatures[:] = [each["temperature"] for each in kinds]
    wishes.top_k[:] = [each.get("top_k", 0) for each in kinds]
    wishes.top_p[:] = [each.get("top_p", 1.0) for each in kinds]
    wishes.min_p[:] = [each.get("min_p", 0.0) for each in kinds]
    wishes.keys[:] = noise_keys(seeds, [0] * len(kinds))
    return wishes


def random_scores(num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("vocab_size", [1, 15, 64, 65, 1000, 5003])
def test_every_cut_leaves_what_the_reference_leaves(draw: Draw, vocab_size: int):
    dice = random.Random(vocab_size)
    kinds = [dict(dice.choice(KINDS)) for _ in range(48)]
    scores = random_scores(len(kinds), vocab_size, vocab_size)
    drawn = draw(scores, wishes_for(kinds))
    assert drawn.is_finite.all()
    for i, kind in enumerate(kinds):
        options: GenerateOptions = {**kind, "seed": i}
        expected = next_scores(scores[i], [], [], options)
        token_id = int(drawn.token_ids[i])
        if token_id != int(expected.argmax()):
            loose = next_scores(scores[i], [], [], options, slack=BORDER)
            assert expected.max() - loose[token_id] < TIE, options


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 5.0, 1000.0])
@pytest.mark.parametrize("cut", [{}, {"min_p": 1e-4}])
def test_leaving_out_hopeless_noise_changes_nothing(draw: Draw, spread: float, cut: GenerateOptions):
    scores = spread * random_scores(64, 3000)
    wishes = wishes_for([{"temperature": 1.0, **cut}] * 64)
    noise = gumbel(torch.from_numpy(wishes.keys)[:, None], torch.arange(3000))
    if cut:
        border = scores.amax(-1) + torch.tensor(1e-4).log()
        noise[scores < border[:, None]] = -torch.inf
    assert draw(scores, wishes).token_ids.tolist() == (scores + noise).argmax(-1).tolist()


def drawn_often(draw: Draw, scores: torch.Tensor, kind: GenerateOptions, num: int) -> set[int]:
    """Tokens drawn with `num` seeds."""
    drawn = draw(scores.expand(num, -1), wishes_for([kind] * num))
    return set(drawn.token_ids.tolist())


@pytest.mark.parametrize("top_k", [0, 200])
@pytest.mark.parametrize("top_p", [0.03, 0.5, 0.9])
def test_a_nucleus_ends_where_it_holds_the_mass(draw: Draw, top_k: int, top_p: float):
    order = torch.randperm(400, generator=torch.Generator().manual_seed(0))
    scores = torch.linspace(0, -2, 400)[order]
    left = scores.double().exp().sort(descending=True)
    masses = left.values[: top_k or 400]
    size = int((masses.cumsum(0) < top_p * masses.sum()).sum()) + 1
    kind: GenerateOptions = {"temperature": 1.0, "top_p": top_p, "top_k": top_k}
    # The least likely one is left out by 15,000 draws in one of a million runs.
    assert drawn_often(draw, scores, kind, 15_000) == set(left.indices[:size].tolist())


def test_a_nucleus_reaches_far_behind_the_best_where_it_must(draw: Draw):
    scores = torch.cat((torch.zeros(1), torch.linspace(-12.5, -13.5, 2000)))
    masses = scores.double().softmax(0)
    top_p = float(masses[:1001].sum())
    drawn = drawn_often(draw, scores, {"temperature": 1.0, "top_p": top_p}, 8000)
    assert 0 in drawn
    assert 500 < max(drawn) <= 1001


def test_torch_and_kernel_draw_the_same():
    kernel = native_draw(library_or_skip())
    scores = random_scores(len(KINDS) * 20, 4099)
    wishes = wishes_for(KINDS * 20)
    ours, plain = kernel(scores, wishes), draw_tokens(scores, wishes)
    assert ours.token_ids.tolist() == plain.token_ids.tolist()
    assert ours.is_finite.all()


@pytest.mark.parametrize("device", ["cpu", "meta"])  # meta: as on any that is no CPU
def test_a_step_that_draws_nothing_is_no_error(device: str):
    drawn = draw_tokens(torch.empty(0, 100, device=device), greedy_wishes([]))
    assert len(drawn.token_ids) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_of_equal_scores_is_the_best(draw: Draw, dtype: torch.dtype):
    scores = torch.randint(0, 4, (30, 3000), generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = [row.index(max(row)) for row in scores.tolist()]
    assert draw(scores, greedy_wishes(range(30))).token_ids.tolist() == expected


@pytest.mark.parametrize("kind", [{"top_k": 5}, {"top_p": 0.3}, {"min_p": 1.0}, {"top_k": 7, "top_p": 0.5}])
def test_all_equal_scores_at_a_border_stay(draw: Draw, kind: GenerateOptions):
    scores = torch.zeros(400, 200)
    scores[:, ::2] = 1.0
    kinds: list[GenerateOptions] = [{"temperature": 1.0, **kind}] * 400
    drawn = draw(scores, wishes_for(kinds))
    assert (drawn.token_ids % 2 == 0).all()
    assert len(np.unique(drawn.token_ids)) > 90


def test_rows_of_bfloat16_and_of_a_larger_tensor_are_read_where_they_lie(draw: Draw):
    scores = random_scores(12, 500).bfloat16()
    wishes = wishes_for(KINDS)
    wishes.rows[:] = torch.arange(11, 0, -1).numpy()
    wide = torch.full((12, 600), 99.0).bfloat16()
    wide[:, 50:550] = scores
    expected = draw(scores[wishes.rows].float(), wishes_for(KINDS))
    assert draw(wide[:, 50:550], wishes).token_ids.tolist() == expected.token_ids.tolist()


def test_a_row_draws_the_same_alone_and_with_any_mates(draw: Draw):
    scores = random_scores(len(KINDS), 9001)
    together = draw(scores, wishes_for(KINDS)).token_ids
    for i, kind in enumerate(KINDS):
        assert draw(scores[i : i + 1], wishes_for([kind], [i])).token_ids[0] == together[i]


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_broken_score_breaks_its_row_alone(draw: Draw, broken: float):
    scores = random_scores(2 * len(KINDS), 300)
    scores[::2, 299] = broken
    kinds = [kind for kind in KINDS for _ in range(2)]
    seeds = [0] * len(kinds)
    drawn = draw(scores, wishes_for(kinds, seeds))
    assert drawn.is_finite.tolist() == [False, True] * len(KINDS)
    alone = draw(scores[1::2], wishes_for(KINDS, seeds[::2]))
    assert drawn.token_ids[1::2].tolist() == alone.token_ids.tolist()


def test_a_row_with_nothing_left_has_no_token(draw: Draw):
    scores = torch.full((len(KINDS), 70), -torch.inf)
    assert not draw(scores, wishes_for(KINDS)).is_finite.any()


def test_what_is_banned_is_never_drawn(draw: Draw):
    scores = random_scores(len(KINDS) * 10, 130)
    scores[:, 2:] = -torch.inf
    assert draw(scores, wishes_for(KINDS * 10)).token_ids.max() <= 1


def test_no_rows_draw_no_tokens(draw: Draw):
    assert len(draw(torch.zeros(0, 10), greedy_wishes(())).token_ids) == 0
