"""What a step costs beside the model: sequences decode on a real engine whose model is a stub.

    python benchmarks/step_cost.py [--sequences 256] [--json]

The stub answers every row with logits made beforehand. Over a vocabulary of 64 the sampler's arithmetic is
next to nothing, so the first table is what Python takes for a step, and for telling a router of it. The
second is what arithmetic adds over the vocabulary of a real model, by way to draw. Times are medians of the
thread's own time, in milliseconds; one thread. Takes about 10 s on a core of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import ParamSpec, TypeVar
from unittest.mock import patch

import torch

import engine.engine
import engine.runner
from decode_worker.admission import Admission, Admissions, Mode
from decode_worker.publisher import Publisher
from decode_worker.record import DecodeRecord
from decode_worker.step_output import step_batches, step_output
from decode_worker.subscription import StepBatch
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import NativeUnavailable
from engine.loading import LoadedModel
from engine.native.library import NativeLibrary, load_library
from engine.request import SequenceRequest, StepResult
from engine.runner import ModelRunner
from engine.sampling import SamplingParams, StopConditions
from engine.scheduler import Scheduler
from kv_transfer.frame import TransferKey
from kv_transfer.transfer import PushTarget
from observability.origin import Origin
from observability.tracing import NO_TRACER
from worker.messages import worker_load
from worker.record import Recorder

P = ParamSpec("P")
T = TypeVar("T")
ROUTER = "router"
BUDGET_MS = 3.0
TINY_VOCABULARY = 64
GREEDY = SamplingParams()
SEEDED = SamplingParams(temperature=0.8, seed=1)
WAYS_TO_DRAW = {
    "greedy": GREEDY,
    "temperature": SEEDED,
    "top_k 50": replace(SEEDED, top_k=50),
    "top_p 0.9": replace(SEEDED, top_p=0.9),
    "min_p 0.05": replace(SEEDED, min_p=0.05),
    "top_k 50, top_p 0.9": replace(SEEDED, top_k=50, top_p=0.9),
    "repetition_penalty 1.1": replace(SEEDED, repetition_penalty=1.1),
}


@dataclass(frozen=True)
class Shape:
    num_sequences: int
    context: int
    num_steps: int


@dataclass(frozen=True)
class Output:
    logits: torch.Tensor


class StubModel(torch.nn.Module):
    def __init__(self, num_rows: int, vocab_size: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self._logits = 3 * torch.randn(1, num_rows, vocab_size, generator=generator)

    def forward(self, logits_to_keep: torch.Tensor, **_: object) -> Output:
        return Output(self._logits[:, : logits_to_keep.shape[0]])


@dataclass
class Clock:
    """Seconds by part: of the step in progress, and of all that ended."""

    now: dict[str, float] = field(default_factory=dict)
    steps: list[dict[str, float]] = field(default_factory=list)

    def timed(self, part: str, function: Callable[P, T]) -> Callable[P, T]:
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            began_at_s = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.now[part] = self.now.get(part, 0.0) + time.thread_time() - began_at_s

        return run

    def next_step(self) -> None:
        self.steps.append(self.now)
        self.now = {}

    def median_ms(self, part: str) -> float:
        return 1000 * median(step[part] for step in self.steps)


@contextmanager
def watched(clock: Clock) -> Iterator[None]:
    """The engine's own functions, timed."""
    with ExitStack() as stack:
        for owner, name in (
            (Scheduler, "schedule"),
            (engine.runner, "pack"),
            (ModelRunner, "run"),
            (engine.engine, "sample"),
            (Engine, "step"),
        ):
            stack.enter_context(patch.object(owner, name, clock.timed(name, getattr(owner, name))))
        yield


def kernels() -> NativeLibrary | None:
    try:
        return load_library(lambda _: None)
    except NativeUnavailable:
        return None


def decoding_engine(shape: Shape, vocab_size: int, params: SamplingParams) -> Engine:
    """All sequences decode, at contexts spread evenly up to `shape.context`."""
    max_tokens = shape.num_steps + 16
    model = LoadedModel(
        module=StubModel(shape.num_sequences, vocab_size),
        folder=Path(),
        device=torch.device("cpu"),
        dtype="bfloat16",
        max_model_len=shape.context + max_tokens,
        vocab_size=vocab_size,
        eos_token_ids=frozenset({0}),
        num_layers=1,
        num_kv_heads=1,
        head_dim=16,
        fingerprint="stub",
        library=kernels(),
    )
    config = EngineConfig(
        num_blocks=shape.num_sequences * ((shape.context + max_tokens) // 16 + 2),
        max_num_seqs=shape.num_sequences,
        max_num_batched_tokens=max(8192, shape.num_sequences),
    )
    made = Engine(model, config)
    for index in range(shape.num_sequences):
        length = max(1, shape.context * (index + 1) // shape.num_sequences)
        made.add(
            SequenceRequest(
                sequence_id=str(TransferKey(f"{index:032x}", 1)),
                prompt_token_ids=tuple((7 * index + i) % vocab_size for i in range(length)),
                known_token_ids=(),
                sampling=params,
                stop=StopConditions(max_tokens, ignore_eos=True),
            )
        )
    while sum(len(output.new_tokens) for output in made.step().outputs) < shape.num_sequences:
        pass
    return made


def run_steps(made: Engine, num_steps: int) -> tuple[Clock, list[StepResult]]:
    clock = Clock()
    results = []
    with watched(clock):
        for _ in range(num_steps):
            results.append(made.step())
            clock.next_step()
    return clock, results


async def publishing_ms(made: Engine, results: list[StepResult]) -> float:
    """What a decode worker does with a step's result, up to the bytes for its one router."""
    admissions = await admitted(results[0])
    publisher = Publisher(max_pending=8, on_gone=lambda _: None)
    subscription = publisher.subscribe(ROUTER)
    is_written = asyncio.Event()

    async def write(batch: StepBatch) -> None:
        step_output(batch, worker_load(made.snapshot())).SerializeToString()
        is_written.set()

    reading = asyncio.create_task(subscription.deliver(write))
    await is_written.wait()
    times = []
    for result in results:
        is_written.clear()
        began_at_s = time.thread_time()
        publisher.tell_step(step_batches(result.outputs, admissions), is_load_news=False)
        await is_written.wait()
        times.append(time.thread_time() - began_at_s)
    reading.cancel()
    await asyncio.wait([reading])
    return 1000 * median(times)


async def admitted(result: StepResult) -> Admissions:
    admissions = Admissions()
    for output in result.outputs:
        transfer_id, _, epoch = output.sequence_id.rpartition("/")
        request = SequenceRequest(output.sequence_id, (1,), (), GREEDY, StopConditions(1))
        granted: asyncio.Future[PushTarget | None] = asyncio.get_running_loop().create_future()
        key = TransferKey(transfer_id, int(epoch))
        record = DecodeRecord(Recorder("bench", NO_TRACER).record(key, Origin()))
        admissions.add(Admission(key, ROUTER, request, Mode.RECEIVE_KV, granted, record))
    return admissions


def python_cost(shape: Shape) -> dict[str, float]:
    """Milliseconds by part, without arithmetic."""
    made = decoding_engine(shape, TINY_VOCABULARY, GREEDY)
    clock, results = run_steps(made, shape.num_steps)
    whole, run, pack = clock.median_ms("step"), clock.median_ms("run"), clock.median_ms("pack")
    schedule, sample = clock.median_ms("schedule"), clock.median_ms("sample")
    return {
        "schedule": schedule,
        "pack": pack,
        "runner": run - pack,
        "sample": sample,
        "rows and outputs": whole - schedule - run - sample,
        "step": whole,
        "publish": asyncio.run(publishing_ms(made, results)),
    }


def sampler_cost(shape: Shape, vocab_size: int) -> dict[str, float]:
    """Milliseconds that a vocabulary adds to a tiny one, by way to draw."""
    costs: dict[str, float] = {}
    for name, params in WAYS_TO_DRAW.items():
        tiny, whole = (
            run_steps(decoding_engine(shape, size, params), 8)[0].median_ms("sample")
            for size in (TINY_VOCABULARY, vocab_size)
        )
        costs[f"{name}, Python"] = tiny
        costs[f"{name}, arithmetic"] = whole - tiny
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description="What a step costs beside the model.")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--json", action="store_true", dest="is_json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape = Shape(options.sequences, options.context, options.steps)
    python, sampler = python_cost(shape), sampler_cost(shape, options.vocabulary)
    if options.is_json:
        print(json.dumps({"python_ms": python, "sampler_ms": sampler, "budget_ms": BUDGET_MS}))
        return
    print(f"{shape.num_sequences} sequences, contexts up to {shape.context}; ms\n")
    for title, costs in (("a step's Python", python), ("the sampler", sampler)):
        print(f"| {title} | ms |\n|---|---|")
        print("\n".join(f"| {part} | {cost:.2f} |" for part, cost in costs.items()) + "\n")


if __name__ == "__main__":
    main()
