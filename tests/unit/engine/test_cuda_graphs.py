"""A GPU's steps without the GPU: FlexAttention is not compiled, and graphs are run, not recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

import engine.cuda_graphs
from engine.batch import BatchRow, PackedBatch, pack
from engine.cuda_graphs import (
    GRAPH_SIZES,
    CudaRun,
    DecodeInputs,
    begun_blocks,
    decode_inputs,
    graph_size,
    padded,
    run_decodes,
)
from engine.cuda_start import cuda_run
from engine.engine import Engine
from engine.errors import ModelError
from engine.kv_pool import KVPool
from engine.layer_watch import LayerWatch
from engine.layout import KVLayout
from engine.loading import LoadedModel
from engine.progress import Progress
from tests.unit.engine.driving import generate, prompt, request

CPU = torch.device("cpu")
POOL = KVPool(KVLayout(2, 2, 16, 16, "float32", "test"), 64, CPU)

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def decodes(*contexts: int) -> PackedBatch:
    """Sequences of one new token at the end of such contexts."""
    rows = [BatchRow([100 + n], n - 1, range(8 * i, 8 * i + -(-n // 16))) for i, n in enumerate(contexts)]
    return pack(rows, [1] * len(rows), POOL)


def test_a_step_takes_the_next_larger_size():
    sizes = [graph_size(decodes(*range(1, n + 1)), (1, 2, 4, 8)) for n in range(1, 9)]
    assert sizes == [1, 2, 4, 4, 8, 8, 8, 8]
    assert graph_size(decodes(*range(1, 6)), (1, 2, 4)) is None
    assert graph_size(decodes(1), ()) is None


def test_a_step_that_does_more_than_decode_takes_none():
    chunk = BatchRow([1, 2], 4, [0])
    assert graph_size(pack([chunk], [1], POOL), GRAPH_SIZES) is None
    assert graph_size(pack([chunk, BatchRow([1], 4, [1])], [1, 1], POOL), GRAPH_SIZES) is None
    unasked = pack([BatchRow([1], 4, [1])], [0], POOL)  # recomputed, and not sampled
    assert graph_size(unasked, GRAPH_SIZES) is None


def test_padding_repeats_the_last_sequence():
    batch = decodes(20, 3, 40)
    wide = padded(batch, 8)
    assert wide.input_ids[0].tolist() == [103, 120, 140, 140, 140, 140, 140, 140]
    assert wide.position_ids[0].tolist() == [2, 19, 39, 39, 39, 39, 39, 39]
    assert wide.logit_rows.tolist() == [1, 0, 2, 2, 2, 2, 2, 2]
    assert wide.paged.num_decodes == 8
    assert wide.paged.first_rows.tolist() == list(range(9))
    assert wide.paged.context_lens.tolist() == [3, 20, 40, 40, 40, 40, 40, 40]
    assert wide.paged.block_tables.tolist() == [[8, 0, 0], [0, 1, 0], *[[16, 17, 18]] * 6]


def test_inputs_stay_where_they_are_and_hold_the_last_step():
    inputs = decode_inputs(padded(decodes(5, 33), 4), max_model_len=100)
    assert inputs.block_tables.shape == (4, 7)
    addresses = [getattr(inputs, name).data_ptr() for name in DecodeInputs.__slots__]
    inputs.take(padded(decodes(17, 2, 9), 4))
    assert [getattr(inputs, name).data_ptr() for name in DecodeInputs.__slots__] == addresses
    assert inputs.input_ids.tolist() == [[102, 109, 117, 117]]
    assert inputs.context_lens.tolist() == [2, 9, 17, 17]
    assert inputs.block_tables[:, :2].tolist() == [[8, 0], [16, 0], [0, 1], [0, 1]]


def test_only_blocks_that_begin_and_stay_open_are_cleared():
    rows = [
        BatchRow([1], 15, [0]),  # fills its block
        BatchRow([1], 16, [1, 2]),  # begins one
        BatchRow([1], 20, [3, 4]),  # goes on in one
        BatchRow([1] * 16, 16, [5, 6]),  # begins one and fills it
        BatchRow([1] * 30, 10, [7, 8, 9]),  # goes on in one, fills one, begins one
        BatchRow([1] * 3, 0, [10]),
    ]
    assert sorted(begun_blocks(pack(rows, [1] * 6, POOL).paged).tolist()) == [2, 9, 10]


class RunGraph:
    """A DecodeGraph that computes each time what a real one would have recorded."""

    made: ClassVar[list[int]] = []  # their sizes

    def __init__(self, module, flex, batch, max_model_len, beside):
        self.made.append(batch.paged.num_decodes)
        self._own = (module, flex, batch.paged.pool, decode_inputs(batch, max_model_len), batch)

    def run(self, batch: PackedBatch) -> torch.Tensor:
        self._own[3].take(batch)
        return run_decodes(*self._own)


@pytest.fixture
def run_graphs(monkeypatch) -> list[int]:
    monkeypatch.setattr(engine.cuda_graphs, "DecodeGraph", RunGraph)
    monkeypatch.setattr(RunGraph, "made", [])
    return RunGraph.made


def on_cuda(made: Engine, sizes: tuple[int, ...] = GRAPH_SIZES) -> Engine:
    assert made.model.module is not None
    made._runner._stack = CudaRun(made.model.module, flex_attention, made.model.max_model_len, sizes)
    made.pool.tensor.zero_()  # uncompiled, FlexAttention multiplies all of it
    return made


# Window; window and softcap; sinks.
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_an_engine_with_graphs_gives_generates_tokens(family, make_engine, reference, run_graphs):
    made = on_cuda(make_engine(family, compile="off", poison_blocks=False))
    prompts = [prompt(length) for length in (1, 15, 17, 60)]
    outputs = generate(made, *(request(ids, 12) for ids in prompts))
    for ids, output in zip(prompts, outputs, strict=True):
        reference(family).assert_follows(ids, output)
    assert run_graphs
    assert len(run_graphs) == len(set(run_graphs))


def test_without_graphs_the_same(make_engine, reference, run_graphs):
    made = on_cuda(make_engine("qwen3", compile="off", poison_blocks=False), sizes=())
    (output,) = generate(made, request(prompt(50), 20))
    assert output == reference("qwen3").generate(prompt(50), 20)
    assert not run_graphs


def test_a_watched_step_runs_eagerly(loaded, run_graphs):
    model = loaded("llama", "off")
    pool = KVPool(model.layout(16), 4, CPU)
    pool.tensor.zero_()
    told: list[int] = []
    run = CudaRun(model.module, flex_attention, model.max_model_len)
    with torch.inference_mode():
        run.run(pack([BatchRow([5], 0, [0])], [1], pool), LayerWatch((0, 1), told.append))
    assert told == [0, 1]
    assert not run_graphs


class NoLookAtNumbers(TorchDispatchMode):
    """Refuses what would make the host wait for a GPU, or bring it something: neither can be recorded."""

    REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "lift_fresh", "_unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not any(name in func.name() for name in self.REFUSED), f"{func.name()} cannot be recorded"
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def decode_unseen(model: LoadedModel) -> None:
    """What a graph records, FlexAttention's own kernel apart."""

    def nothing(query: torch.Tensor, *_: torch.Tensor, **__: object) -> torch.Tensor:
        return query

    pool = KVPool(model.layout(16), 64, CPU)
    batch = pack([BatchRow([5], 3, [3]), BatchRow([7], 20, [1, 2])], [1, 1], pool)
    inputs = decode_inputs(batch, model.max_model_len)
    assert model.module is not None
    with NoLookAtNumbers():
        run_decodes(model.module, nothing, pool.tensor, inputs, batch)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma2"])
def test_what_a_graph_records_never_looks_at_numbers(family, loaded):
    decode_unseen(loaded(family, "off"))


def test_a_family_that_looks_at_its_input_cannot_be_recorded(loaded):
    """transformers' gpt2 looks for padding. On a GPU its trial fails, and it runs without graphs."""
    with pytest.raises(AssertionError, match="cannot be recorded"):
        decode_unseen(loaded("gpt2", "off"))


@pytest.fixture
def tried(loaded, monkeypatch) -> Callable[..., tuple[LoadedModel, KVPool]]:
    """A model whose trial takes `flex` on this CPU."""

    def make(flex: object, compile: str = "auto") -> tuple[LoadedModel, KVPool]:
        monkeypatch.setattr("engine.cuda_start.find_spec", lambda _: object())
        monkeypatch.setattr("engine.cuda_start.compiled_flex", lambda: flex)
        model = loaded("llama", "off")
        pool = KVPool(model.layout(16), 4, CPU)
        return replace(model, compile=compile), pool

    return make


def broken(*_: object, **__: object) -> torch.Tensor:
    raise RuntimeError("no such instruction")


def test_a_model_runs_with_what_works_and_the_log_says_what_was_lost(tried, monkeypatch, caplog):
    monkeypatch.setattr("engine.cuda_graphs.DecodeGraph", broken)
    model, pool = tried(flex_attention)
    run = cuda_run(model, model.module, pool, Progress())
    assert isinstance(run, CudaRun)
    assert not run._graph_sizes
    assert "running without CUDA graphs: a trial failed" in caplog.text
    assert "without FlexAttention" not in caplog.text


def test_a_model_whose_flex_attention_fails_runs_on_torch(tried, caplog):
    model, pool = tried(broken)
    assert cuda_run(model, model.module, pool, Progress()) is None
    assert "running without FlexAttention: a trial failed: no such instruction" in caplog.text


def test_a_model_whose_flex_attention_is_wrong_runs_on_torch(tried, caplog):
    def wrong(*args: object, **options: object) -> object:
        return flex_attention(*args, **(options | {"score_mod": lambda score, *_: score + 1 - score}))

    model, pool = tried(wrong)
    assert cuda_run(model, model.module, pool, Progress()) is None
    assert "running without FlexAttention: a trial failed: they give other logits" in caplog.text


def test_compile_on_refuses_what_does_not_work(tried):
    model, pool = tried(broken, "on")
    with pytest.raises(ModelError, match=r"compile: on .* CUDA graphs cannot be had"):
        cuda_run(model, model.module, pool, Progress())


def test_without_triton_a_model_runs_on_torch(loaded, monkeypatch, caplog):
    monkeypatch.setattr("engine.cuda_start.find_spec", lambda _: None)
    model = loaded("llama", "off")
    pool = KVPool(model.layout(16), 4, CPU)
    assert cuda_run(replace(model, compile="auto"), model.module, pool, Progress()) is None
    assert "the package triton is not installed" in caplog.text
