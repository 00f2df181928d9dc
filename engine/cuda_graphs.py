"""Steps on a GPU: FlexAttention in the module, and steps that only decode replayed from CUDA graphs.

A graph is recorded for a fixed number of sequences, the first time that one of its size is wanted, over input
tensors that stay where they are: a step copies its inputs there, padded up to the size, and replays. Other
steps run eagerly. Padding repeats the step's last sequence: it writes the same K and V to the same cells.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.batch import PackedBatch, PagedBatch
from engine.flex_attention import Flex, flex_batch, flex_decodes
from engine.layer_watch import LayerWatch
from engine.module_run import ModuleRun
from engine.progress import Progress

log = logging.getLogger(__name__)

GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Steps before recording: kernels are compiled and workspaces taken in them.
_NUM_WARM_UPS = 2


def graph_size(batch: PackedBatch, sizes: Sequence[int]) -> int | None:
    """The number of sequences that the step is padded to; None where no graph of these sizes serves it."""
    paged = batch.paged
    num_seqs = len(paged.context_lens)
    if not num_seqs == paged.num_decodes == len(batch.logit_rows):
        return None
    return next((size for size in sizes if size >= num_seqs), None)


def padded(batch: PackedBatch, size: int) -> PackedBatch:
    """Of decoding sequences: the last one is repeated, and so is the last row of logits."""
    paged = batch.paged
    here = torch.arange(size).clamp(max=paged.num_decodes - 1)
    there = here.to(paged.pool.device)
    return PackedBatch(
        input_ids=batch.input_ids.index_select(1, there),
        position_ids=batch.position_ids.index_select(1, there),
        logit_rows=batch.logit_rows.index_select(0, there),
        paged=PagedBatch(
            pool=paged.pool,
            num_decodes=size,
            first_rows=torch.arange(size + 1, dtype=torch.int32),
            context_lens=paged.context_lens[here],
            block_tables=paged.block_tables[here],
        ),
    )


def begun_blocks(paged: PagedBatch) -> torch.Tensor:
    """[…]: the blocks that this step begins and does not fill. Each is its sequence's own."""
    context_lens, first_rows = paged.context_lens.numpy(), paged.first_rows.numpy()
    last = (context_lens - 1) // paged.block_size
    is_begun = context_lens - np.diff(first_rows) <= last * paged.block_size
    which = np.flatnonzero(is_begun & (context_lens % paged.block_size != 0))
    return torch.from_numpy(paged.block_tables.numpy()[which, last[which]].astype(np.int64))


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """What a graph reads, on the GPU. S sequences, block tables as wide as the longest context."""

    input_ids: torch.Tensor  # [1, S]
    position_ids: torch.Tensor  # [1, S]
    logit_rows: torch.Tensor  # [S]
    block_tables: torch.Tensor  # [S, W]
    context_lens: torch.Tensor  # [S]

    def take(self, batch: PackedBatch) -> None:
        """`batch` is padded to S. Columns behind its tables keep what they had: nothing reads them."""
        self.input_ids.copy_(batch.input_ids)
        self.position_ids.copy_(batch.position_ids)
        self.logit_rows.copy_(batch.logit_rows)
        self.block_tables[:, : batch.paged.block_tables.shape[1]].copy_(batch.paged.block_tables)
        self.context_lens.copy_(batch.paged.context_lens)


def decode_inputs(batch: PackedBatch, max_model_len: int) -> DecodeInputs:
    """Room for steps of this size, filled with this one."""
    device, paged = batch.paged.pool.device, batch.paged
    width = -(-max_model_len // paged.block_size)
    inputs = DecodeInputs(
        input_ids=torch.empty_like(batch.input_ids),
        position_ids=torch.empty_like(batch.position_ids),
        logit_rows=torch.empty_like(batch.logit_rows),
        block_tables=torch.zeros(paged.num_decodes, width, dtype=torch.int32, device=device),
        context_lens=torch.empty(paged.num_decodes, dtype=torch.int32, device=device),
    )
    inputs.take(batch)
    return inputs


def run_decodes(
    module: torch.nn.Module, flex: Flex, pool: torch.Tensor, inputs: DecodeInputs, batch: PackedBatch
) -> torch.Tensor:
    """Logits [S, V] of what `inputs` hold, read from nowhere else: `batch` has a step's form only."""
    attention = flex_decodes(pool, inputs.block_tables, inputs.context_lens, flex)
    step = PackedBatch(inputs.input_ids, inputs.position_ids, inputs.logit_rows, batch.paged)
    return ModuleRun(module, attention).run(step)


class DecodeGraph:
    """One size's. Its logits are good until it is replayed."""

    def __init__(
        self,
        module: torch.nn.Module,
        flex: Flex,
        batch: PackedBatch,
        max_model_len: int,
        beside: DecodeGraph | None,
    ) -> None:
        """Records a graph of `batch`'s size. It shares its working memory with the one that it is `beside`:
        only one runs at a time.
        """
        pool = batch.paged.pool
        self._inputs = decode_inputs(batch, max_model_len)
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_NUM_WARM_UPS):  # they write what the replay will write again
                run_decodes(module, flex, pool, self._inputs, batch)
        torch.cuda.current_stream().wait_stream(stream)
        memory = None if beside is None else beside._graph.pool()
        # Other threads go on meanwhile: they ship KV.
        with torch.cuda.graph(self._graph, pool=memory, capture_error_mode="thread_local"):
            self._logits = run_decodes(module, flex, pool, self._inputs, batch)

    def run(self, batch: PackedBatch) -> torch.Tensor:
        self._inputs.take(batch)
        self._graph.replay()
        return self._logits


class CudaRun:
    """One engine's steps on its GPU."""

    def __init__(
        self,
        module: torch.nn.Module,
        flex: Flex,
        max_model_len: int,
        graph_sizes: Sequence[int] = GRAPH_SIZES,
        progress: Progress | None = None,
    ) -> None:
        self._module = module
        self._flex = flex
        self._max_model_len = max_model_len
        self._graph_sizes = graph_sizes
        self._progress = progress or Progress()
        self._graphs: dict[int, DecodeGraph] = {}

    @property
    def kernels(self) -> str:
        return f"FlexAttention{', CUDA graphs' if self._graph_sizes else ''}"

    def run(self, batch: PackedBatch, watch: LayerWatch | None = None) -> torch.Tensor:
        """Logits [R, vocab], good until the next step; K and V go into the pool."""
        clear_begun(batch.paged)
        size = graph_size(batch, self._graph_sizes) if watch is None else None
        if size is None:
            flex = flex_batch(batch.paged, self._flex)
            return ModuleRun(self._module, flex, self._progress).run(batch, watch)
        logits = self._replay(padded(batch, size), size)
        return logits[: len(batch.logit_rows)]

    def _replay(self, batch: PackedBatch, size: int) -> torch.Tensor:
        if size not in self._graphs:
            log.info("recording a CUDA graph for %d sequences", size)
            beside = next(iter(self._graphs.values()), None)
            with self._progress.compiling():
                self._graphs[size] = DecodeGraph(self._module, self._flex, batch, self._max_model_len, beside)
        return self._graphs[size].run(batch)


def clear_begun(paged: PagedBatch) -> None:
    """FlexAttention multiplies what a mask hides by 0, so a block must hold numbers before it is read: its
    unwritten slots may hold NaN. A block that a step fills needs nothing, and what arrives has zeros there.
    """
    blocks = begun_blocks(paged)
    if len(blocks):
        paged.pool.index_fill_(0, blocks.to(paged.pool.device), 0)
