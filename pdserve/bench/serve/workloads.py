"""The workloads. Each has a rate of its own; `Workload.at_rate` stretches it to the one that is wanted."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from pdserve.bench.errors import BenchError
from pdserve.bench.serve.arrivals import random_arrivals
from pdserve.bench.serve.conversation import draw_lengths, draw_times
from pdserve.bench.serve.dialogues import Dialogue
from pdserve.bench.serve.prompts import TokenPrompts
from pdserve.bench.serve.trace import MOONCAKE_BLOCK_TOKENS, Trace, TraceRow
from pdserve.bench.serve.workload import Limits, PlannedRequest, Scaling, Workload

# Where a workload has no number of its own.
DEFAULT_REQUESTS = 100
# What a prompt's tokens are drawn for: two kinds never share one key.
_UNIQUE, _PREFIX, _BLOCK = range(3)


def random_workload(
    num_requests: int,
    num_prompt_tokens: int,
    num_tokens: int,
    *,
    range_ratio: float = 0.0,
    burstiness: float = 1.0,
    vocab_size: int,
    seed: int = 0,
    prompt_seed: int | None = None,
) -> Workload:
    """Lengths are even over (1 ± range_ratio) times what is given; no two prompts begin alike.

    `prompt_seed` draws the prompts' tokens, `seed` (if None, those too) everything else: the same load again,
    with prompts that no cache has seen.
    """
    return shared_prefix_workload(
        num_requests,
        1,
        0,
        num_prompt_tokens,
        num_tokens,
        range_ratio=range_ratio,
        burstiness=burstiness,
        vocab_size=vocab_size,
        seed=seed,
        prompt_seed=prompt_seed,
        name="random",
    )


def shared_prefix_workload(
    num_requests: int,
    num_prefixes: int,
    num_prefix_tokens: int,
    num_prompt_tokens: int,
    num_tokens: int,
    *,
    range_ratio: float = 0.0,
    burstiness: float = 1.0,
    vocab_size: int,
    seed: int = 0,
    prompt_seed: int | None = None,
    name: str = "prefix",
) -> Workload:
    """Each prompt is one of `num_prefixes` beginnings, drawn evenly, and `num_prompt_tokens` of its own."""
    if not 0 <= range_ratio < 1:
        raise BenchError(f"a range ratio of {range_ratio:g}: it is at least 0 and less than 1")
    rng = np.random.default_rng(seed)
    prompts = TokenPrompts(vocab_size, seed if prompt_seed is None else prompt_seed)
    times = random_arrivals(num_requests, burstiness, rng)
    own = _around(num_prompt_tokens, range_ratio, num_requests, rng)
    answers = _around(num_tokens, range_ratio, num_requests, rng)
    prefixes = [prompts.make(num_prefix_tokens, _PREFIX, index) for index in range(num_prefixes)]
    chosen = rng.integers(0, num_prefixes, num_requests).tolist()
    requests = []
    for index in range(num_requests):
        prompt = prefixes[chosen[index]] + prompts.make(own[index], _UNIQUE, index)
        requests.append(PlannedRequest(times[index], prompt, answers[index], len(prompt)))
    return Workload(name, tuple(requests))


def trace_workload(
    trace: Trace,
    *,
    limits: Limits | None = None,
    block_tokens: int | None = None,
    vocab_size: int,
    seed: int = 0,
) -> Workload:
    """Lengths and arrivals as in the trace. Prompts with block ids begin alike as far as their ids do, others
    never do.

    `block_tokens`: every block of a trace that has them, the last too, becomes one of so many tokens, which
    keeps shared beginnings exact at shorter lengths; None: true lengths. Answers keep theirs.
    `seed` draws the prompts' tokens and nothing else.
    """
    if block_tokens is not None and any(row.block_ids is None for row in trace.rows):
        raise BenchError(f"{trace.name} has no blocks that could be made shorter")
    limits = limits or Limits()
    prompts = TokenPrompts(vocab_size, seed)
    begin_s = trace.rows[0].at_s
    requests, num_clipped = [], [0, 0]
    for index, row in enumerate(trace.rows):
        whole = _prompt_of(row, index, block_tokens, prompts)
        prompt = whole[: limits.max_prompt_tokens]
        num_tokens = min(row.num_tokens, limits.max_tokens or row.num_tokens)
        num_clipped[0] += len(prompt) < len(whole)
        num_clipped[1] += num_tokens < row.num_tokens
        requests.append(PlannedRequest(row.at_s - begin_s, prompt, num_tokens, len(prompt)))
    has_blocks = any(row.block_ids is not None for row in trace.rows)
    scaling = Scaling(
        trace_start_s=begin_s,
        trace_rate=trace.rate,
        num_clipped_prompts=num_clipped[0],
        num_clipped_answers=num_clipped[1],
        block_tokens=(block_tokens or MOONCAKE_BLOCK_TOKENS) if has_blocks else None,
        trace_block_tokens=MOONCAKE_BLOCK_TOKENS if has_blocks else None,
    )
    return Workload(trace.name, tuple(requests), scaling)


def conversation_trace(num_requests: int, seed: int = 0) -> Trace:
    """Drawn with the lengths' distributions and the arrivals' burstiness of Azure's conversation trace, for
    where its file is not at hand. One request a second.
    """
    rng = np.random.default_rng(seed)
    lengths = draw_lengths(num_requests, rng)
    times = draw_times(num_requests, rng)
    rows = (TraceRow(at_s, *each, None) for at_s, each in zip(times, lengths, strict=True))
    return Trace("conversation", tuple(rows))


def dialogue_workload(
    dialogues: Sequence[Dialogue],
    num_requests: int | None = None,
    *,
    burstiness: float = 1.0,
    limits: Limits | None = None,
    seed: int = 0,
) -> Workload:
    """Each is drawn once at most: a prompt that comes again is cached, and TTFT too good. Only answers are
    clipped: prompts are text.

    `num_requests`: None is 100, or all where there are fewer. Raises BenchError where there are not so many.
    """
    if not dialogues:
        raise BenchError("there are no dialogues to draw from")
    wanted = min(DEFAULT_REQUESTS, len(dialogues)) if num_requests is None else num_requests
    if wanted > len(dialogues):
        raise BenchError(f"there are {len(dialogues)} dialogues, not {wanted}: none is sent twice in a run")
    rng = np.random.default_rng(seed)
    times = random_arrivals(wanted, burstiness, rng)
    order: list[int] = rng.permutation(len(dialogues)).tolist()
    longest = (limits or Limits()).max_tokens
    requests = []
    for at_s, index in zip(times, order, strict=False):
        chosen = dialogues[index]
        num_tokens = min(chosen.num_tokens, longest or chosen.num_tokens)
        requests.append(PlannedRequest(at_s, chosen.prompt, num_tokens, None))
    return Workload("dialogues", tuple(requests))


def _around(middle: int, ratio: float, count: int, rng: np.random.Generator) -> list[int]:
    low, high = max(1, round(middle * (1 - ratio))), max(1, round(middle * (1 + ratio)))
    drawn: list[int] = rng.integers(low, high + 1, count).tolist()
    return drawn


def _prompt_of(row: TraceRow, index: int, block_tokens: int | None, prompts: TokenPrompts) -> tuple[int, ...]:
    if row.block_ids is None:
        return prompts.make(row.num_prompt_tokens, _UNIQUE, index)
    length = block_tokens or MOONCAKE_BLOCK_TOKENS
    blocks = (prompts.make(length, _BLOCK, each) for each in row.block_ids)
    whole = tuple(itertools.chain.from_iterable(blocks))
    return whole if block_tokens is not None else whole[: row.num_prompt_tokens]
