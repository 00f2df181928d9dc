"""The sampler against the slow one, on random scores: every option alone, and many together."""

from __future__ import annotations

import random

import pytest
import torch

from engine.sampler import SampleRow
from engine.sampling import SamplingParams, StopConditions
from engine.seen_tokens import SeenTokens
from engine.stopping import banned_token_ids
from pdserve.requests import GenerateOptions
from tests.reference_sampler import BORDER, EOS, next_scores
from tests.unit.engine.drawing import sample_by
from tests.unit.engine.driving import TIE

NUM_STEPS = 40


def options_of(dice: random.Random, vocab_size: int) -> GenerateOptions:
    every: GenerateOptions = {
        "temperature": dice.choice([0.2, 0.8, 1.0, 1.6]),
        "top_k": dice.choice([1, 3, 40, vocab_size]),
        "top_p": dice.choice([0.05, 0.5, 0.9, 0.999]),
        "min_p": dice.choice([0.01, 0.1, 0.5]),
        "repetition_penalty": dice.choice([0.7, 1.3]),
        "presence_penalty": dice.choice([-1.0, 1.5]),
        "frequency_penalty": dice.choice([-0.5, 0.8]),
        "logit_bias": {dice.randrange(vocab_size): dice.uniform(-5, 5) for _ in range(5)},
        "min_tokens": 20,
    }
    kept = {name: value for name, value in every.items() if dice.random() < 0.4}
    return {"seed": dice.getrandbits(64), **kept}  # type: ignore[typeddict-item]


def row_of(options: GenerateOptions, prompt: list[int], output: list[int]) -> SampleRow:
    names = SamplingParams.__dataclass_fields__.keys() & options.keys()
    known = {name: options[name] for name in names}  # type: ignore[literal-required]
    known["logit_bias"] = tuple(options.get("logit_bias", {}).items())
    known.setdefault("temperature", 1.0)
    params = SamplingParams(**known)
    stop = StopConditions(NUM_STEPS, options.get("min_tokens", 0))
    return SampleRow(
        params=params,
        position=len(output),
        banned_token_ids=banned_token_ids(stop, frozenset(EOS), len(output)),
        seen=SeenTokens(prompt, output) if params.has_penalties else None,
    )


@pytest.mark.parametrize("way", ["torch", "kernel"])
@pytest.mark.parametrize("vocab_size", [512, 9000])
def test_random_options_draw_what_the_reference_draws(vocab_size, way):
    sample = sample_by(way)
    dice = random.Random(vocab_size)
    generator = torch.Generator().manual_seed(vocab_size)
    num_rows = 16
    wishes = [options_of(dice, vocab_size) for _ in range(num_rows)]
    prompts = [[dice.randrange(vocab_size) for _ in range(30)] for _ in range(num_rows)]
    outputs: list[list[int]] = [[] for _ in range(num_rows)]
    # Few good tokens, so that they come again and penalties count.
    spread = 3 * torch.randn(vocab_size, generator=generator)
    num_ties = 0
    for _ in range(NUM_STEPS if vocab_size == 512 else 4):
        logits = spread + torch.randn(num_rows, vocab_size, generator=generator)
        rows = [row_of(*each) for each in zip(wishes, prompts, outputs, strict=True)]
        drawn = sample(logits, rows)
        for i, each in enumerate(drawn):
            assert each.token_id is not None
            scores = next_scores(logits[i], prompts[i], outputs[i], wishes[i])
            if each.token_id != int(scores.argmax()):
                loose = next_scores(logits[i], prompts[i], outputs[i], wishes[i], slack=BORDER)
                assert scores.max() - loose[each.token_id] < TIE, wishes[i]
                num_ties += 1
            outputs[i].append(each.token_id)
    assert num_ties <= 2
