"""`generate --explain`: who did what, what it cost beside what the machine could do, and a picture of it."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass

from rich.console import Group
from rich.table import Table
from rich.text import Text

from pdserve.bench import work
from pdserve.cli.answer import Answer, timings_table
from pdserve.cli.console import err
from pdserve.cli.costs import Costs, PhaseCost, costs_of
from pdserve.cli.picture import draw
from pdserve.cli.target import Target
from pdserve.client import Cluster, Model, PdserveError, Worker

_TIMEOUT_S = 10.0
_PICTURE_WIDTH = 60
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Facts:
    """What a router tells of its model and workers."""

    model: Model
    cluster: Cluster

    def worker(self, worker_id: str) -> Worker | None:
        workers = (worker for pool in self.cluster.pools for worker in pool.workers)
        return next((worker for worker in workers if worker.id == worker_id), None)

    @property
    def shape(self) -> work.ModelShape | None:
        """None where a token's work cannot be counted."""
        shape, itemsize = self.model.shape, _ITEM_BYTES.get(self.model.dtype)
        if shape is None or itemsize is None:
            return None
        return work.ModelShape(
            num_layer_weights=shape.num_layer_weights,
            num_head_weights=shape.num_head_weights,
            num_query_heads=shape.num_query_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            windows=shape.windows,
            itemsize=itemsize,
        )


async def ask_facts(target: Target) -> Facts | None:
    """None where they are not to be had: the answer is there, and is explained without them."""
    try:
        async with target.client() as client:
            model = await client.get_model(timeout=_TIMEOUT_S)
            return Facts(model, await client.get_cluster(timeout=_TIMEOUT_S))
    except PdserveError:
        return None


def explanation(answers: list[Answer], facts: Facts | None) -> Group:
    """Measures this machine where it is the one that did the work: a second or two."""
    rates = _Rates(facts)
    parts: list[Table | Text] = []
    for answer in answers:
        table = timings_table([answer])
        finished = answer.finished
        if finished is None:
            raise ValueError(f"answer {answer.index} has no end")
        shape = facts.shape if facts is not None else None
        if shape is not None:
            both = (rates.of(finished.prefill_worker), rates.of(finished.decode_worker))
            for row in cost_rows(answer, costs_of(finished, shape, *both)):
                table.add_row(*row)
        parts += [table, Text()]
        parts += [Text.from_markup(line, overflow="crop") for line in draw(finished, _PICTURE_WIDTH)]
    return Group(*parts)


def cost_rows(answer: Answer, costs: Costs) -> list[tuple[str, str, str]]:
    rows: list[tuple[str, str, str]] = []
    if costs.prefill is not None:
        amount = f"{costs.prefill.amount / 1e9:.1f} GFLOP at {costs.prefill.rate / 1e9:.0f} GFLOP/s"
        rows.append(("prefill's work", "arithmetic", amount + _share(costs.prefill, 1e9, "GFLOP/s")))
    if costs.decode is not None:
        amount = f"{costs.decode.amount / 1e6:.0f} MB read a step at {costs.decode.rate / 1e9:.1f} GB/s"
        rows.append(("decode's work", "memory", amount + _share(costs.decode, 1e9, "GB/s")))
    if costs.recompute_s is not None and answer.finished is not None:
        taken_s = answer.finished.timings.decode_ms / 1000
        times = f", {costs.recompute_s / taken_s:.0f} times as long" if taken_s else ""
        again = f"without it, decoding would have taken {costs.recompute_s:.1f} s{times}"
        rows.append(("KV cache", "saved", f"{again}: each token the whole text again"))
    return rows


def _share(cost: PhaseCost, unit: float, name: str) -> str:
    if cost.share is None or cost.peak is None:
        return ""
    bound = "bound by memory" if cost.is_memory_bound else "bound by arithmetic"
    peak = f"{cost.peak / unit:.0f} {name}"
    if cost.share > 1:
        return f": all that this machine does, {bound} (measured just now: {peak})"
    return f": {cost.share:.0%} of this machine's {peak}, {bound}"


class _Rates:
    """Of this machine, once for each number of threads. None for workers that are not here or on no CPU."""

    def __init__(self, facts: Facts | None) -> None:
        self._facts = facts
        self._measured: dict[int, work.Rates] = {}

    def of(self, worker_id: str) -> work.Rates | None:
        worker = self._facts.worker(worker_id) if self._facts is not None else None
        if self._facts is None or worker is None or worker.node != socket.gethostname():
            return None
        num_threads = worker.limits.num_threads
        if num_threads and num_threads not in self._measured:
            with err.status("measuring what this machine can do"):
                self._measured[num_threads] = _measure(self._facts.model.dtype, num_threads)
        return self._measured.get(num_threads)


def _measure(dtype: str, num_threads: int) -> work.Rates:
    from engine.threads import use_threads  # torch takes seconds to load
    from pdserve.bench.machine import Machine

    use_threads(num_threads)
    # By the processor's time: while others have the core, it does nothing for us.
    machine = Machine(dtype, num_threads, lambda _: None, lambda: time.process_time() / num_threads)
    return machine.measure()
