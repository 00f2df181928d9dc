"""The rounds of a row: in each of them the machine, then every engine, so that what drifts drifts for all."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from pdserve.bench.limits import row_work
from pdserve.bench.rows import Phase, Plan, Row
from pdserve.bench.subject import Subject, Timed
from pdserve.bench.work import ModelShape, Rates, is_memory_bound, limit_s


@dataclass(frozen=True, slots=True)
class RowResult:
    """What concerns the limit is None where the model's work cannot be told from its shape, and what concerns
    vLLM where it was not asked.
    """

    row: Row
    tok_s: float
    limit_share: float | None
    is_memory_bound: bool | None
    vllm_tok_s: float | None
    rates: Rates

    @property
    def ratio(self) -> float | None:
        return None if self.vllm_tok_s is None else self.tok_s / self.vllm_tok_s


@dataclass(frozen=True, slots=True)
class Bench:
    """What all rows have in common."""

    ours: Subject
    theirs: Subject | None
    measure_rates: Callable[[], Rates]
    shape: ModelShape | None
    vocab_size: int
    plan: Plan

    @property
    def subjects(self) -> list[Subject]:
        return [self.ours] if self.theirs is None else [self.ours, self.theirs]


def measure_row(bench: Bench, row: Row, tell: Callable[[], None]) -> RowResult:
    """`tell` is called after every round. Raises BenchError."""
    rng = random.Random(row.name)
    rates: list[Rates] = []
    timed: list[list[Timed]] = []
    warm_prompts = _prompts(rng, row, bench.vocab_size)
    for subject in bench.subjects:
        _warm_up(subject, row, bench.plan, warm_prompts)
    for _ in range(bench.plan.num_rounds):
        prompts = _prompts(rng, row, bench.vocab_size)
        rates.append(bench.measure_rates())
        timed.append([_round(subject, row, bench.plan, prompts) for subject in bench.subjects])
        tell()
    for subject in bench.subjects:
        subject.end()
    return _result(bench, row, rates, timed)


def _warm_up(subject: Subject, row: Row, plan: Plan, prompts: list[list[int]]) -> None:
    """Memory is taken and kernels are chosen where nobody looks at the clock."""
    if row.phase is Phase.PREFILL:
        subject.prefill(prompts[0])
    elif not plan.is_fresh_each_round(row):
        _begin(subject, row, plan, prompts)


def _round(subject: Subject, row: Row, plan: Plan, prompts: list[list[int]]) -> Timed:
    if row.phase is Phase.PREFILL:
        return subject.prefill(prompts[0])
    if not plan.is_fresh_each_round(row):
        return subject.decode(plan.num_steps)
    _begin(subject, row, plan, prompts)
    timed = subject.decode(plan.num_steps)
    subject.end()
    return timed


def _begin(subject: Subject, row: Row, plan: Plan, prompts: list[list[int]]) -> None:
    subject.begin(prompts, plan.num_new_tokens(row) + 1)
    subject.decode(plan.num_warm_steps)


def _prompts(rng: random.Random, row: Row, vocab_size: int) -> list[list[int]]:
    return [[rng.randrange(vocab_size) for _ in range(row.context)] for _ in range(row.batch)]


def _result(bench: Bench, row: Row, rates: list[Rates], timed: list[list[Timed]]) -> RowResult:
    tok_s = [median(each.tok_s for each in of_subject) for of_subject in zip(*timed, strict=True)]
    usual = Rates(median(each.operations for each in rates), median(each.num_bytes for each in rates))
    share, memory_bound = None, None
    if bench.shape is not None:
        work = row_work(bench.shape, row, bench.plan)
        num_tokens = row.context if row.phase is Phase.PREFILL else row.batch
        share = tok_s[0] * limit_s(work, usual) / num_tokens
        memory_bound = is_memory_bound(work, usual)
    return RowResult(row, tok_s[0], share, memory_bound, tok_s[1] if len(tok_s) > 1 else None, usual)
