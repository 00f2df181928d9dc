"""How long the engine alone takes for each phase on this machine: what the ideal is simulated from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median
from typing import cast

from benchmarks.disagg_vs_colocated.engine_child import EngineChild, engine_child
from benchmarks.disagg_vs_colocated.engine_process import Order, Settings
from benchmarks.disagg_vs_colocated.phases import PhaseTimes, PrefillTime, StepTime
from benchmarks.disagg_vs_colocated.results import Results
from benchmarks.disagg_vs_colocated.settings import MODEL, Sizes
from benchmarks.disagg_vs_colocated.shown import Shown

# Both cores read one memory: a phase is slower while the other one runs. "alone": it does not.
ALONE, BESIDE = "alone", "beside"
CONDITIONS = (ALONE, BESIDE)
# What the other core does: the other phase at a usual size. Reading its own prompts before it can decode is a
# small part of its time.
_OTHER_PREFILL = Order(1024, is_endless=True)
_OTHER_DECODE = Order(512, batch=8, num_steps=2500, is_endless=True)


def key(condition: str) -> str:
    return f"rates/{condition}"


def phase_times(results: Results, condition: str) -> PhaseTimes | None:
    """None: they were not measured."""
    point = results.get(key(condition))
    if point is None:
        return None
    rows = cast("dict[str, list[list[float]]]", point)
    return PhaseTimes(
        [PrefillTime(int(num_tokens), seconds) for num_tokens, seconds in rows["prefills"]],
        [StepTime(int(batch), int(context), seconds) for batch, context, seconds in rows["steps"]],
    )


def measure(results: Results, sizes: Sizes, cores: Sequence[int], shown: Shown) -> None:
    """Every condition that the file lacks. Raises BenchError."""
    for condition in CONDITIONS:
        if key(condition) in results:
            shown.skip()
            continue
        point = shown.begin(f"phases {condition}", sizes.rate_rounds * _num_orders(sizes))
        with ExitStack() as stack:
            ours = stack.enter_context(engine_child(_settings(sizes, cores[0])))
            other = None
            if condition == BESIDE:
                other = stack.enter_context(engine_child(_settings(sizes, cores[1])))
            prefills = _rounds(ours, other, _OTHER_DECODE, _prefills(sizes), sizes.rate_rounds, point.ended)
            steps = _rounds(ours, other, _OTHER_PREFILL, _steps(sizes), sizes.rate_rounds, point.ended)
        results.put(
            key(condition),
            {
                "prefills": [
                    [each.num_tokens, s] for each, s in zip(_prefills(sizes), prefills, strict=True)
                ],
                "steps": [
                    [each.batch, each.num_tokens, s] for each, s in zip(_steps(sizes), steps, strict=True)
                ],
            },
        )
        shown.done(f"phases {condition}: measured")


def _rounds(
    ours: EngineChild,
    other: EngineChild | None,
    does: Order,
    orders: Sequence[Order],
    num_rounds: int,
    tell: Callable[[], None],
) -> list[float]:
    """The median of each order's seconds; `other` does its own all the while."""
    if other is not None:
        other.do(does)
    found: list[list[float]] = [[] for _ in orders]
    for _ in range(num_rounds):
        for seconds, order in zip(found, orders, strict=True):
            seconds.append(ours.do(order))
            tell()
    return [median(each) for each in found]


def _prefills(sizes: Sizes) -> list[Order]:
    return [Order(num_tokens) for num_tokens in sizes.prefill_tokens]


def _steps(sizes: Sizes) -> list[Order]:
    return [Order(context, batch, sizes.num_steps) for batch, context in sizes.steps]


def _num_orders(sizes: Sizes) -> int:
    return len(sizes.prefill_tokens) + len(sizes.steps)


def _settings(sizes: Sizes, core: int) -> Settings:
    orders = [*_steps(sizes), _OTHER_DECODE]
    most = max(order.batch * (order.num_tokens + order.num_steps) for order in orders)
    batch = max(order.batch for order in orders)
    return Settings(MODEL, most + max(sizes.prefill_tokens), batch + 1, core)
