"""What stands in for the torch tiles of `engine/attention.py` where there is something faster."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.attention_rules import AttentionRules
from engine.batch import PagedBatch


class AttentionKernel(Protocol):
    def can_attend(self, query: torch.Tensor, pool: torch.Tensor, rules: AttentionRules) -> bool:
        """Whether it computes this. `query` [Hq, T, D]."""
        ...

    def attend(
        self,
        batch: PagedBatch,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rules: AttentionRules,
    ) -> torch.Tensor:
        """query [Hq, T, D], key and value [H, T, D] → [T, Hq, D]; writes key and value to the pool first."""
        ...
