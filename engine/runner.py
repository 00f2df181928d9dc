"""Runs the model on one step's rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.batch import BatchRow, pack
from engine.kv_pool import KVPool
from engine.loading import LoadedModel


class ModelRunner:
    def __init__(self, model: LoadedModel, pool: KVPool) -> None:
        self._module = model.module
        self._pool = pool

    @torch.inference_mode()
    def run(self, rows: Sequence[BatchRow], num_logits: Sequence[int]) -> torch.Tensor:
        """Computes all rows, their K and V into the pool → logits [R, V] of the last `num_logits[i]` tokens
        of each row, in order.
        """
        batch = pack(rows, num_logits, self._pool)
        output = self._module(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=batch.logit_rows,
            paged_batch=batch.paged,
        )
        logits: torch.Tensor = output.logits[0]
        return logits
