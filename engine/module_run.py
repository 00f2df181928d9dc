"""A step by transformers' own module, with our attention inside."""

from __future__ import annotations

import torch

from engine.attention_kernel import AttentionKernel
from engine.batch import PackedBatch
from engine.layer_watch import LayerWatch
from engine.progress import Progress


class ModuleRun:
    def __init__(
        self,
        module: torch.nn.Module,
        attention: AttentionKernel | None = None,
        progress: Progress | None = None,
    ) -> None:
        """`attention`: what attends in place of the torch tiles."""
        self._module = module
        self._attention = attention
        self._progress = progress

    def run(self, batch: PackedBatch, watch: LayerWatch | None = None) -> torch.Tensor:
        """Logits [R, vocab]; K and V go into the pool. `watch` is told by the attention function."""
        if watch is not None and 0 in watch.stops:
            watch.tell(0)
        output = self._module(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=batch.logit_rows,
            paged_batch=batch.paged,
            attention_kernel=self._attention,
            layer_watch=watch,
            progress=self._progress,
        )
        logits: torch.Tensor = output.logits[0]
        return logits
