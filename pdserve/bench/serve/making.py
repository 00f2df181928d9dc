"""From settings to a workload."""

from __future__ import annotations

from pdserve.bench.serve.choice import Kind, WorkloadChoice
from pdserve.bench.serve.dialogues import read_dialogues, token_counter
from pdserve.bench.serve.prompts import in_words
from pdserve.bench.serve.trace import read_trace
from pdserve.bench.serve.workload import Workload
from pdserve.bench.serve.workloads import (
    DEFAULT_REQUESTS,
    conversation_trace,
    dialogue_workload,
    shared_prefix_workload,
    trace_workload,
)


def make_workload(choice: WorkloadChoice, vocab_size: int, prompt_seed: int) -> Workload:
    """Of equal choices the shape is the same; `prompt_seed` draws the prompts' tokens. Raises BenchError."""
    workload = _made(choice, vocab_size, prompt_seed)
    if choice.rate is not None or choice.kind is not Kind.TRACE:
        workload = workload.at_rate(choice.rate or 1.0)
    return in_words(workload) if choice.is_text else workload


def _made(choice: WorkloadChoice, vocab_size: int, prompt_seed: int) -> Workload:
    num_requests = choice.num_requests or DEFAULT_REQUESTS
    if choice.kind is Kind.DIALOGUES and choice.file is not None:
        counter = None if choice.tokenizer is None else token_counter(choice.tokenizer)
        dialogues = read_dialogues(choice.file, counter)
        return dialogue_workload(
            dialogues,
            choice.num_requests,
            burstiness=choice.burstiness,
            limits=choice.limits,
            seed=choice.seed,
        )
    if choice.kind in (Kind.TRACE, Kind.CONVERSATION):
        trace = conversation_trace(num_requests, choice.seed)
        if choice.kind is Kind.TRACE and choice.file is not None:
            trace = read_trace(choice.file).window(choice.trace_start_s, choice.num_requests)
        return trace_workload(
            trace,
            limits=choice.limits,
            block_tokens=choice.block_tokens,
            vocab_size=vocab_size,
            seed=prompt_seed,
        )
    is_prefix = choice.kind is Kind.PREFIX
    return shared_prefix_workload(
        num_requests,
        choice.num_prefixes if is_prefix else 1,
        choice.num_prefix_tokens if is_prefix else 0,
        choice.num_prompt_tokens,
        choice.num_tokens,
        range_ratio=choice.range_ratio,
        burstiness=choice.burstiness,
        vocab_size=vocab_size,
        seed=choice.seed,
        prompt_seed=prompt_seed,
        name=choice.kind.value,
    )
