"""Upper bounds of the histograms: those of vLLM, finer where service levels are set (40 to 100 ms of ITL).

The first one lies below the values: a quantile in the first bucket is a guess between 0 and its bound.
"""

from __future__ import annotations

# A first token, and what it is made of.
LATENCY_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 4.0),
    *(5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
# Between tokens. A GPU takes a few ms for a step.
TOKEN_SECONDS = (
    *(0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.075, 0.1, 0.15, 0.2, 0.3),
    *(0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 40.0),
)
# A whole request.
REQUEST_SECONDS = (
    *(0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0),
)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
