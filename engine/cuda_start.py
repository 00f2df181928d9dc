"""What a model on a GPU runs by: tried out before it is used, held against torch's own path."""

from __future__ import annotations

import logging
from importlib.util import find_spec

import torch

from engine.compiles import tell_compiles
from engine.cuda_graphs import GRAPH_SIZES, CudaRun
from engine.errors import ModelError, first_line
from engine.flex_attention import compiled_flex, why_no_flex
from engine.kv_pool import KVPool
from engine.layout import DTYPES
from engine.loading import LoadedModel
from engine.module_run import ModuleRun
from engine.native.verify import BLOCK_SIZE, answer
from engine.progress import Progress

log = logging.getLogger(__name__)


def cuda_run(model: LoadedModel, module: torch.nn.Module, pool: KVPool, progress: Progress) -> CudaRun | None:
    """With CUDA graphs, or without, or None: as much as works, said in the log. ModelError where that is less
    than all of it and the model's `compile` is on.
    """
    reason = why_no_flex(pool.tensor)
    if reason is None and find_spec("triton") is None:
        reason = "the package triton is not installed"
    if reason is not None:
        _lose(model, "FlexAttention and CUDA graphs", reason)
        return None
    tell_compiles(progress)
    flex = compiled_flex()
    for graph_sizes, lost in ((GRAPH_SIZES, "CUDA graphs"), ((), "FlexAttention")):
        reason = _why_not(model, module, CudaRun(module, flex, model.max_model_len, graph_sizes))
        if reason is None:
            return CudaRun(module, flex, model.max_model_len, graph_sizes, progress)
        _lose(model, lost, reason)
    return None


def _lose(model: LoadedModel, lost: str, reason: str) -> None:
    if model.compile == "on":
        raise ModelError(f"compile: on was asked for, and {lost} cannot be had: {reason}")
    log.warning("running without %s: %s", lost, reason)


def _why_not(model: LoadedModel, module: torch.nn.Module, run: CudaRun) -> str | None:
    """What goes wrong when `run` is tried; None if nothing does."""
    tokens = model.layout(BLOCK_SIZE), model.vocab_size, model.max_model_len, model.device
    expected = answer(ModuleRun(module).run, *tokens)
    try:
        answer(run.run, *tokens).check(expected, DTYPES[model.dtype])
    except Exception as error:  # the compiler's, the driver's or the model's: told, and we do without
        log.debug("a trial failed", exc_info=True)
        return f"a trial failed: {first_line(error)}"
    return None
