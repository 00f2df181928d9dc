"""When requests come: sorted times in seconds from 0, at one request a second in the mean."""

from __future__ import annotations

import numpy as np

from pdserve.bench.errors import BenchError


def random_arrivals(num_requests: int, burstiness: float, rng: np.random.Generator) -> list[float]:
    """Gaps are gamma distributed: burstiness 1 is a Poisson process, less is burstier (the gaps' coefficient
    of variation is 1 / sqrt(burstiness)), infinity is a clock.

    The mean gap is exactly 1: two draws differ in shape only, not in load.
    """
    if not burstiness > 0:
        raise BenchError(f"a burstiness of {burstiness:g}: it has to be above 0")
    if np.isinf(burstiness):
        return [float(index) for index in range(num_requests)]
    gaps = rng.gamma(burstiness, 1 / burstiness, max(0, num_requests - 1))
    total = gaps.sum()
    if total > 0:
        gaps *= len(gaps) / total
    return [0.0, *np.cumsum(gaps).tolist()][:num_requests]
