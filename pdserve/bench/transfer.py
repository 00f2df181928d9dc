"""`pdserve bench transfer` without its face: raw rates between two processes, then hand-overs of real
requests.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from engine.config import EngineConfig, ModelConfig
from engine.errors import EngineError
from engine.model_facts import read_facts
from engine.threads import use_threads
from engine.weights import resolve_model
from kv_transfer.layout import KVLayout
from pdserve.bench.engine import Progress
from pdserve.bench.errors import BenchError
from pdserve.bench.handover import NUM_NEW_TOKENS, HandOverResult, measure_handovers
from pdserve.bench.raw_transfer import RawResult, measure_raw
from pdserve.bench.transfer_plan import Plan


@dataclass(frozen=True, slots=True)
class Report:
    raw: tuple[RawResult, ...]
    handovers: tuple[HandOverResult, ...]
    token_bytes: int  # of KV
    max_num_batched_tokens: int
    load_before: float  # processes that wanted a core in the minute before


def run(model: ModelConfig, transports: Sequence[str], plan: Plan, progress: Progress) -> Report:
    """Raises BenchError, ClusterError, PdserveError."""
    load_before = os.getloadavg()[0]
    use_threads(1)
    layout = _layout(model, plan, progress)
    raw: list[RawResult] = []
    for transport in transports:
        progress.say(f"raw rate of {transport}")
        raw += measure_raw(transport, layout, plan.tokens, plan.num_rounds, progress.advance)
    handovers: list[HandOverResult] = []
    if plan.num_requests_each != 0:
        for transport in transports:
            handovers += measure_handovers(transport, model, layout, plan, progress.say, progress.advance)
    token_bytes = layout.block_bytes // layout.block_size
    return Report(tuple(raw), tuple(handovers), token_bytes, plan.max_num_batched_tokens, load_before)


def _layout(model: ModelConfig, plan: Plan, progress: Progress) -> KVLayout:
    """Its blocks are as the workers' will be."""
    try:
        facts = read_facts(resolve_model(model.id, progress.say), model.max_model_len)
    except EngineError as error:
        raise BenchError(str(error)) from error
    longest, num_new = max(plan.tokens), 0 if plan.num_requests_each == 0 else NUM_NEW_TOKENS
    if facts.context is not None and longest + num_new > facts.context:
        answer = f" and an answer of {num_new}" if num_new else ""
        raise BenchError(f"{longest} tokens{answer} do not fit in the model's context of {facts.context}")
    return facts.layout(EngineConfig().block_size, facts.dtype(model.dtype, is_cuda=False))
