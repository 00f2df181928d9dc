"""Lengths and arrivals like those of Azure's conversation trace of 2023 (19,366 requests; AzurePublicDataset,
described in Splitwise, ISCA 2024), drawn from its percentiles.
"""

from __future__ import annotations

import numpy as np

from pdserve.bench.serve.arrivals import random_arrivals

_PERCENTS = (0, 1, 5, 10, 25, 40, 50, 60, 75, 80, 85, 90, 95, 99, 99.9, 100)
_PROMPT_TOKENS = (2, 29, 181, 207, 396, 703, 1020, 1071, 1189, 1315, 1876, 2734, 4083, 4142, 6179, 14050)
_ANSWER_TOKENS = (7, 16, 41, 54, 85, 103, 129, 177, 395, 400, 411, 424, 451, 601, 954, 1000)
# The gaps' coefficient of variation. The lengths of a prompt and of its answer hardly correlate (0.07).
_GAP_VARIATION = 1.094


def draw_lengths(num_requests: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Tokens of prompt and answer, from the inverse of each distribution, straight between percentiles."""
    percents = rng.uniform(0, 100, (2, num_requests))
    prompts = np.interp(percents[0], _PERCENTS, _PROMPT_TOKENS).round().astype(int).tolist()
    answers = np.interp(percents[1], _PERCENTS, _ANSWER_TOKENS).round().astype(int).tolist()
    return list(zip(prompts, answers, strict=True))


def draw_times(num_requests: int, rng: np.random.Generator) -> list[float]:
    return random_arrivals(num_requests, 1 / _GAP_VARIATION**2, rng)
