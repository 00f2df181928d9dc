"""A step by transformers' own module, with our attention inside."""

from __future__ import annotations

import torch

from engine.batch import PackedBatch


class ModuleRun:
    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def run(self, batch: PackedBatch) -> torch.Tensor:
        """Logits [R, vocab]; K and V go into the pool."""
        output = self._module(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=batch.logit_rows,
            paged_batch=batch.paged,
        )
        logits: torch.Tensor = output.logits[0]
        return logits
