"""`pdserve bench engine` without its face: loads what is measured, measures the rows, ends what it began."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Protocol

from engine.config import ModelConfig, SpeculativeConfig
from engine.engine import Engine
from engine.errors import EngineError
from engine.threads import use_threads
from pdserve.bench.errors import BenchError
from pdserve.bench.limits import read_shape
from pdserve.bench.machine import Machine, pin
from pdserve.bench.measure import Bench, RowResult, measure_row
from pdserve.bench.ours import OurEngine, engine_config
from pdserve.bench.rows import Plan, Row
from pdserve.bench.speculation import SpeculationResult, measure_speculation
from pdserve.bench.vllm_process import VllmProcess, VllmSettings, running_vllm
from pdserve.bench.work import Rates


@dataclass(frozen=True, slots=True)
class Wanted:
    model: ModelConfig
    rows: tuple[Row, ...]
    plan: Plan
    num_threads: int
    max_num_batched_tokens: int
    vllm_python: Path | None
    speculative: SpeculativeConfig | None  # None: its answers are not measured


@dataclass(frozen=True, slots=True)
class VllmFacts:
    version: str
    max_num_batched_tokens: int
    idle_load: float  # cores that it kept busy while ours was measured


@dataclass(frozen=True, slots=True)
class Report:
    rows: tuple[RowResult, ...]
    dtype: str
    is_compiled: bool  # our kernels ran the layers, not torch's
    cores: tuple[int, ...]
    load_before: float  # processes that wanted a core in the minute before
    max_num_batched_tokens: int
    vllm: VllmFacts | None
    speculation: tuple[SpeculationResult, ...]

    @property
    def rates(self) -> Rates:
        """The machine's, over all rows."""
        of_rows = [each.rates for each in self.rows]
        return Rates(median(each.operations for each in of_rows), median(each.num_bytes for each in of_rows))


class Progress(Protocol):
    """Who watches."""

    def say(self, what: str) -> None:
        """What is going on, in a few words."""

    def advance(self) -> None:
        """One more round of one row is done."""


def run(wanted: Wanted, progress: Progress) -> Report:
    """Raises BenchError."""
    try:
        return _run(wanted, progress)
    except EngineError as error:
        raise BenchError(str(error)) from error


def _run(wanted: Wanted, progress: Progress) -> Report:
    load_before = os.getloadavg()[0]
    cores = pin(wanted.num_threads)
    use_threads(wanted.num_threads)
    config = engine_config(wanted.rows, wanted.plan, wanted.max_num_batched_tokens)
    engine = Engine.load(wanted.model, config, progress.say)
    _check_context(wanted, engine)
    with ExitStack() as stack:
        vllm: VllmProcess | None = None
        if wanted.vllm_python is not None:
            progress.say("starting vLLM, which takes a minute or two")
            settings = _vllm_settings(wanted, engine, cores)
            vllm = stack.enter_context(running_vllm(wanted.vllm_python, settings))
        rows = _measure_rows(wanted, engine, vllm, progress)
        facts = None if vllm is None else _facts(vllm)
    speculation: list[SpeculationResult] = []
    if wanted.speculative is not None:
        rounds = wanted.plan.num_rounds
        speculation = measure_speculation(engine.model, wanted.speculative, rounds, progress.say)
    return Report(
        rows=tuple(rows),
        dtype=engine.model.dtype,
        is_compiled=engine.model.decoder is not None,
        cores=tuple(cores),
        load_before=load_before,
        max_num_batched_tokens=config.max_num_batched_tokens,
        vllm=facts,
        speculation=tuple(speculation),
    )


def _measure_rows(
    wanted: Wanted, engine: Engine, vllm: VllmProcess | None, progress: Progress
) -> list[RowResult]:
    machine = Machine(engine.model.dtype, wanted.num_threads, progress.say)
    bench = Bench(
        ours=OurEngine(engine),
        theirs=vllm,
        measure_rates=machine.measure,
        shape=read_shape(engine.model.folder, engine.layout),
        vocab_size=engine.model.vocab_size,
        plan=wanted.plan,
    )
    results: list[RowResult] = []
    for row in wanted.rows:
        progress.say(row.name)
        results.append(measure_row(bench, row, progress.advance))
    return results


def _facts(vllm: VllmProcess) -> VllmFacts:
    return VllmFacts(vllm.version, vllm.max_num_batched_tokens, vllm.idle_load)


def _check_context(wanted: Wanted, engine: Engine) -> None:
    context = engine.limits.max_model_len
    fitting = [row.name for row in wanted.rows if wanted.plan.max_tokens(row) <= context]
    if len(fitting) < len(wanted.rows):
        told = f"these do: --rows {','.join(fitting)}" if fitting else "none of them does"
        raise BenchError(f"not all rows fit in the model's context of {context} tokens; {told}")


def _vllm_settings(wanted: Wanted, engine: Engine, cores: Sequence[int]) -> VllmSettings:
    return VllmSettings(
        model_folder=engine.model.folder,
        dtype=engine.model.dtype,
        max_model_len=max(wanted.plan.max_tokens(row) for row in wanted.rows),
        max_num_seqs=max(row.batch for row in wanted.rows),
        # Its blocks are larger, so more of them are not full.
        kv_cache_bytes=2 * engine.limits.num_blocks * engine.layout.block_bytes,
        cores=cores,
    )
