"""One request at a time: what each system costs where nothing disturbs it."""

from __future__ import annotations

from benchmarks.disagg_vs_colocated.results import Results, as_rows, from_rows
from benchmarks.disagg_vs_colocated.settings import Sizes, System
from benchmarks.disagg_vs_colocated.shown import Shown
from benchmarks.disagg_vs_colocated.systems import Open
from pdserve.bench.serve.prompts import TokenPrompts
from pdserve.bench.serve.records import RequestRecord
from pdserve.bench.serve.run import run
from pdserve.bench.serve.workload import PlannedRequest, Workload


def key(system: System) -> str:
    return f"unloaded/{system.value}"


def records(results: Results, system: System) -> list[RequestRecord] | None:
    point = results.get(key(system))
    return None if point is None else from_rows(point)


async def measure(results: Results, system: System, open_client: Open, sizes: Sizes, shown: Shown) -> None:
    if key(system) in results:
        shown.skip()
        return
    lengths = [length for _ in range(sizes.unloaded_rounds) for length in sizes.unloaded_tokens]
    point = shown.begin(f"{system.value} unloaded", len(lengths))
    done: list[RequestRecord] = []
    async with open_client() as client:
        prompts = TokenPrompts((await client.served()).vocab_size or 30_000, seed=11)
        for index, length in enumerate(lengths):
            request = PlannedRequest(0.0, prompts.make(length, index), sizes.unloaded_answer_tokens, length)
            done += await run(Workload("unloaded", (request,)), client, point)
    results.put(key(system), as_rows(done))
    shown.done(f"{system.value}: unloaded latencies")
