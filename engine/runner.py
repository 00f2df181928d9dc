"""Runs the model on one step's rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.batch import BatchRow, PackedBatch, pack
from engine.errors import ModelError
from engine.kv_pool import KVPool
from engine.layer_watch import LayerWatch
from engine.loading import LoadedModel
from engine.module_run import ModuleRun
from engine.native.attention import NativeAttention
from engine.native.decoder import NativeRun
from engine.progress import Progress


class Stack(Protocol):
    def run(self, batch: PackedBatch, watch: LayerWatch | None = None) -> torch.Tensor:
        """Logits [R, vocab], good until the next step; K and V go into the pool."""
        ...


class ModelRunner:
    def __init__(self, model: LoadedModel, pool: KVPool, progress: Progress | None = None) -> None:
        self._stack, self.kernels = _stack(model, pool, progress or Progress())
        self._pool = pool

    @torch.inference_mode()
    def run(
        self, rows: Sequence[BatchRow], num_logits: Sequence[int], watch: LayerWatch | None = None
    ) -> torch.Tensor:
        """Computes all rows, their K and V into the pool → logits [R, V] of the last `num_logits[i]` tokens
        of each row, in order. `watch` is told on the way.
        """
        return self._stack.run(pack(rows, num_logits, self._pool), watch)


def _stack(model: LoadedModel, pool: KVPool, progress: Progress) -> tuple[Stack, str]:
    """What runs the model, and what to say of it."""
    if model.decoder is not None:
        return NativeRun(model.decoder, progress), model.kernels
    if model.module is None:
        raise ModelError("the model has neither a decoder nor a module")
    if model.device.type == "cuda" and model.compile != "off":
        from engine.cuda_start import cuda_run  # FlexAttention and its compiler, for GPUs only

        run = cuda_run(model, model.module, pool, progress)
        if run is not None:
            return run, run.kernels
        plain = ModuleRun(model.module, progress=progress)
        return plain, "torch: FlexAttention cannot be had, the worker's log says why"
    attention = None if model.library is None else NativeAttention(model.library)
    return ModuleRun(model.module, attention, progress), model.kernels
