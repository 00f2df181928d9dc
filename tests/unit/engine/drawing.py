"""The sampler by each of its ways to draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from engine.draw import draw_tokens
from engine.native.sampling import native_draw
from engine.sampler import Sampled, SampleRow, sample
from tests.unit.engine.native.kernels import library_or_skip

Sample = Callable[[torch.Tensor, Sequence[SampleRow]], list[Sampled]]


def sample_by(way: str) -> Sample:
    """`torch`, or `kernel`: ours, where this machine has it."""
    return partial(sample, draw=draw_tokens if way == "torch" else native_draw(library_or_skip()))
