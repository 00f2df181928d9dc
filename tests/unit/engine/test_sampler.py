from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from engine.noise import gumbel, noise_key, noise_keys
from engine.sampler import GREEDY, SampleRow
from engine.sampling import SamplingParams
from engine.seen_tokens import SeenTokens
from tests.unit.engine.drawing import Sample, sample_by

VOCAB = 64


@pytest.fixture(params=["torch", "kernel"])
def sample(request: pytest.FixtureRequest) -> Sample:
    return sample_by(request.param)


def row(params: SamplingParams, position: int = 0, **fields: object) -> SampleRow:
    return replace(SampleRow(params, position), **fields)


def draw_many(sample: Sample, logits: torch.Tensor, params: SamplingParams, num: int) -> torch.Tensor:
    """How often each token is drawn over `num` positions."""
    drawn = sample(logits.expand(num, -1), [row(params, position) for position in range(num)])
    return torch.bincount(torch.tensor([s.token_id for s in drawn]), minlength=logits.shape[0])


def test_greedy_takes_the_best_token(sample: Sample):
    logits = torch.randn(5, VOCAB)
    assert [s.token_id for s in sample(logits, [row(SamplingParams())] * 5)] == logits.argmax(-1).tolist()


def test_draws_follow_the_distribution(sample: Sample):
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0])
    counts = draw_many(sample, logits, SamplingParams(temperature=0.7, seed=3), 20_000)
    expected = torch.softmax(logits / 0.7, 0) * 20_000
    assert torch.all((counts - expected).abs() < 5 * expected.sqrt() + 5)


def test_the_noise_is_gumbels_and_finite():
    noise = gumbel(torch.tensor([[noise_key(1, p)] for p in range(50)]), torch.arange(2000)[None])
    assert noise.isfinite().all()
    assert abs(float(noise.mean()) - 0.5772) < 0.02
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.05


def test_noise_depends_on_seed_position_and_token_only():
    ids = torch.arange(100)[None]
    keys = torch.tensor([[noise_key(7, 3)], [noise_key(7, 4)], [noise_key(8, 3)]])
    noise = gumbel(keys, ids)
    assert torch.equal(noise[:1], gumbel(keys[:1], ids))
    assert torch.equal(noise[:1, 40:60], gumbel(keys[:1], ids[:, 40:60]))
    assert not torch.equal(noise[0], noise[1])
    assert not torch.equal(noise[0], noise[2])
    assert noise_key(2**64 - 1, 10**6) != noise_key(0, 10**6)


def test_keys_made_together_are_those_made_alone():
    pairs = [(0, 0), (7, 3), (2**63 + 5, 10**6), (2**64 - 1, 1), (-1, 2)]
    assert noise_keys(*zip(*pairs, strict=True)).tolist() == [noise_key(*pair) for pair in pairs]


def test_a_greedy_row_is_one_made_for_it(sample: Sample):
    logits = torch.randn(3, VOCAB)
    assert sample(logits, [GREEDY, row(SamplingParams(), 5), GREEDY]) == sample(
        logits, [row(SamplingParams())] * 3
    )


def test_a_row_draws_the_same_token_alone_and_among_others(sample: Sample):
    logits = torch.randn(8, VOCAB)
    kinds = [
        SamplingParams(temperature=0.8, seed=1),
        SamplingParams(),
        SamplingParams(temperature=1.5, top_k=5, seed=2),
        SamplingParams(temperature=1.0, top_p=0.6, seed=2**63 + 5),
        SamplingParams(temperature=1.0, min_p=0.2, seed=4),
        SamplingParams(temperature=0.3, repetition_penalty=1.3, seed=5),
        SamplingParams(frequency_penalty=0.5, presence_penalty=0.1),
        SamplingParams(num_logprobs=2),
    ]
    rows = [
        row(p, i, seen=SeenTokens((1, 2), (3, 3)) if p.has_penalties else None) for i, p in enumerate(kinds)
    ]
    together = sample(logits, rows)
    assert [sample(logits[i : i + 1], [rows[i]])[0] for i in range(8)] == together


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-9, 3e38, 1e300])
def test_every_temperature_leaves_something_to_draw(sample: Sample, temperature: float):
    logits = 50 * torch.randn(20, VOCAB)
    drawn = sample(logits, [row(SamplingParams(temperature=temperature, seed=i)) for i in range(20)])
    tokens = [s.token_id for s in drawn]
    assert None not in tokens
    assert temperature > 1 or tokens == logits.argmax(-1).tolist()


def test_top_k_draws_among_the_k_best(sample: Sample):
    logits = torch.linspace(0, 1, VOCAB)
    counts = draw_many(sample, logits, SamplingParams(temperature=5.0, top_k=3), 400)
    assert counts[:-3].sum() == 0
    assert (counts[-3:] > 0).all()


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9])
def test_top_p_draws_from_the_smallest_set_that_holds_the_mass(sample: Sample, top_p):
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))
    probs, order = torch.softmax(logits, 0).sort(descending=True)
    size = int((probs.cumsum(0) < top_p).sum()) + 1
    counts = draw_many(sample, logits, SamplingParams(temperature=1.0, top_p=top_p), 3000)
    assert set(counts.nonzero().flatten().tolist()) <= set(order[:size].tolist())
    assert counts[order[size - 1]] > 0


def test_a_nucleus_wider_than_the_guesses_is_found(sample: Sample):
    logits = torch.zeros(20_000)
    logits[0] = 1.0
    counts = draw_many(sample, logits, SamplingParams(temperature=1.0, top_p=0.999), 300)
    assert counts.count_nonzero() > 250


def test_min_p_drops_what_is_unlikely_beside_the_best(sample: Sample):
    logits = torch.tensor([0.0, math.log(0.5), math.log(0.05)])
    counts = draw_many(sample, logits, SamplingParams(temperature=1.0, min_p=0.1), 500)
    assert counts[2] == 0
    assert counts[1] > 0


def test_penalties_and_bias_move_scores(sample: Sample):
    logits = torch.tensor([[3.0, 2.9, 2.8, -1.0]])

    def best(params: SamplingParams, **fields: object) -> int | None:
        return sample(logits, [row(params, **fields)])[0].token_id

    assert best(SamplingParams(repetition_penalty=1.2), seen=SeenTokens((0,), ())) == 1
    assert best(SamplingParams(presence_penalty=0.15), seen=SeenTokens((), (0,))) == 1
    assert best(SamplingParams(frequency_penalty=0.1), seen=SeenTokens((), (0, 0, 0, 1, 1))) == 2
    assert best(SamplingParams(frequency_penalty=0.1), seen=SeenTokens((0, 0), ())) == 0
    assert best(SamplingParams(logit_bias=((3, 10.0),))) == 3


def test_banned_tokens_cannot_be_drawn(sample: Sample):
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    for params in (SamplingParams(), SamplingParams(temperature=1.0, top_k=1)):
        assert sample(logits, [row(params, banned_token_ids=frozenset({0}))])[0].token_id == 1


def test_logprobs_are_the_models_own(sample: Sample):
    logits = torch.randn(1, VOCAB)
    params = SamplingParams(temperature=3.0, top_k=2, logit_bias=((5, 100.0),), num_logprobs=3)
    drawn = sample(logits, [row(params)])[0]
    expected = torch.log_softmax(logits[0], 0)
    assert drawn.logprobs is not None
    assert drawn.token_id == drawn.logprobs.chosen.token_id == 5
    assert drawn.logprobs.chosen.logprob == pytest.approx(float(expected[5]), abs=1e-5)
    assert [t.token_id for t in drawn.logprobs.top] == expected.topk(3).indices.tolist()
    assert [t.logprob for t in drawn.logprobs.top] == pytest.approx(
        expected.topk(3).values.tolist(), abs=1e-5
    )


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0, top_p=0.5, top_k=9)])
def test_a_row_with_nan_breaks_alone(sample: Sample, params):
    logits = torch.randn(3, VOCAB)
    logits[1, 7] = float("nan")
    drawn = sample(logits, [row(params)] * 3)
    assert drawn[1].token_id is None
    assert drawn[0].token_id is not None
    assert drawn[2].token_id is not None


def test_bfloat16_logits_are_sampled_in_float32(sample: Sample):
    logits = torch.randn(4, VOCAB).bfloat16()
    rows = [row(SamplingParams(temperature=0.9, seed=s)) for s in range(4)]
    assert sample(logits, rows) == sample(logits.float(), rows)
