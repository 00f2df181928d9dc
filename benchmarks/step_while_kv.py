"""What becomes of decode steps while KV arrives in the same process: quiet and loaded in turn.

    python benchmarks/step_while_kv.py
    python benchmarks/step_while_kv.py --transports shm --batch 8 --mb-s 720

The engine decodes on one thread while another process pushes KV into a pool beside the engine's, through the
real sender and receiver, paced at four times what one prefill worker computes here. A gap is the time from
one step's tokens to the next one's. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from rich.console import Console
from rich.progress import track

from engine.config import ModelConfig
from engine.engine import Engine
from engine.threads import use_threads
from pdserve.bench.ours import OurEngine, engine_config
from pdserve.bench.raw_transfer import RawBench, raw_bench
from pdserve.bench.rows import Phase, Plan, Row
from pdserve.bench.transfer_ends import TRANSPORTS

NUM_TOKENS = 512  # of each hand-over
NUM_STEPS = 100  # of a turn


class Pacer(threading.Thread):
    """Orders a hand-over whenever its time has come; late ones are made up for."""

    def __init__(self, bench: RawBench, num_blocks: int, interval_s: float) -> None:
        super().__init__(name="pacer", daemon=True)
        self._bench = bench
        self._num_blocks = num_blocks
        self._interval_s = interval_s
        self._ending = threading.Event()
        self.num_shipped = 0

    def run(self) -> None:
        due = time.monotonic()
        while not self._ending.wait(max(0.0, due - time.monotonic())):
            self._bench.ship_s(self._num_blocks, 1)
            self.num_shipped += 1
            due += self._interval_s

    def end(self) -> None:
        self._ending.set()
        self.join()


@contextmanager
def loaded(bench: RawBench, num_blocks: int, interval_s: float) -> Iterator[Pacer]:
    pacer = Pacer(bench, num_blocks, interval_s)
    pacer.start()
    try:
        yield pacer
    finally:
        pacer.end()


def gaps(subject: OurEngine) -> list[float]:
    """Milliseconds from step to step."""
    return [1000 * subject.decode(1).seconds for _ in range(NUM_STEPS)]


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transports", default=",".join(TRANSPORTS))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--mb-s", type=float, default=720.0)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    use_threads(1)
    row = Row("decode", Phase.DECODE, asked.batch, asked.context)
    plan = Plan(num_rounds=2 * asked.rounds * len(TRANSPORTS), num_steps=NUM_STEPS, max_refilled_tokens=0)
    engine = Engine.load(ModelConfig(device="cpu"), engine_config([row], plan, 512))
    subject = OurEngine(engine)
    rng = random.Random(0)
    prompts = [[rng.randrange(1000, 40000) for _ in range(asked.context)] for _ in range(asked.batch)]
    num_blocks = engine.layout.num_blocks_for(NUM_TOKENS)
    num_bytes = num_blocks * engine.layout.block_bytes
    print("| transport | MB/s | step p50 quiet → loaded, ms | | p99 quiet → loaded, ms | |")
    print("|---|---|---|---|---|---|")
    for transport in asked.transports.split(","):
        quiet: list[float] = []
        busy: list[float] = []
        num_shipped, seconds = 0, 0.0
        with raw_bench(transport, engine.layout, num_blocks) as bench:
            subject.begin(prompts, plan.num_new_tokens(row) + 1)
            subject.decode(4)
            bench.ship_s(num_blocks, 3)
            rounds = range(asked.rounds)
            for _ in track(rounds, transport, console=Console(stderr=True), transient=True):
                quiet += gaps(subject)
                began = time.monotonic()
                with loaded(bench, num_blocks, num_bytes / (asked.mb_s * 1e6)) as pacer:
                    busy += gaps(subject)
                seconds += time.monotonic() - began
                num_shipped += pacer.num_shipped
            subject.end()
        steps, tails = (median(quiet), median(busy)), (p99(quiet), p99(busy))
        cells = (f"{a:.1f} → {b:.1f} | {b / a:.2f}" for a, b in (steps, tails))
        print(f"| {transport} | {num_shipped * num_bytes / seconds / 1e6:.0f} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
