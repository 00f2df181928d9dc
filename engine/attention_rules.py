"""What a layer's attention asks for."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionRules:
    """What a layer asks for beside softmax(QKᵀ·scaling)V."""

    scaling: float
    sliding_window: int | None = None  # a query sees so many keys, itself included
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # [query heads]: a logit each that takes weight and gives nothing
