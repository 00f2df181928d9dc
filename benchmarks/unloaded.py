"""One request at a time on 1P1D and on one colocated worker: where its time goes, and what two workers add.

    python benchmarks/unloaded.py
    python benchmarks/unloaded.py --tokens 16,128 --rounds 20 --transport grpc
    python benchmarks/unloaded.py --addresses 127.0.0.1:50051 127.0.0.1:50053

Starts and ends both clusters, unless the addresses of two that run are given (1P1D first). They are asked in
turn, each first in every other round, so that a machine whose speed drifts drifts for both. Every prompt is
new to the prefix caches, and the pools were written once before: pages that the system must find first cost
either kind of worker some percent. TTFT is the client's: from its call to its first event. Prints a Markdown
table of medians; what is added is the median of the differences within the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median

from rich.console import Console
from rich.progress import track

from pdserve import Client
from pdserve.bench.interrupted import tidily
from pdserve.bench.own_cluster import own_cluster
from pdserve.client import Finished, Timings

HEADINGS = (
    "prompt tokens",
    "TTFT ms, 1P1D",
    "TTFT ms, colocated",
    "added ms",
    "added",
    "prefill tok/s",
    "KV shipped MB",
    "transfer ms",
    "ITL ms, 1P1D",
    "ITL ms, colocated",
)
# Prompts of this length, so many, go once over all blocks of the pools.
WARM_TOKENS, NUM_WARM = 2048, 3
KV_CACHE = "96MiB"
POOLS: Mapping[str, tuple[str, ...]] = {"1p1d": ("prefill", "decode"), "colocated": ("colocated",)}


@dataclass(frozen=True, slots=True)
class Answer:
    ttft_ms: float
    timings: Timings


async def ask(client: Client, prompt: Sequence[int], max_tokens: int) -> Answer:
    asked_at = time.perf_counter()
    first_at: float | None = None
    timings: Timings | None = None
    async for event in client.generate_stream(prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True):
        first_at = first_at or time.perf_counter()
        if isinstance(event, Finished):
            timings = event.timings
    if first_at is None or timings is None:
        raise RuntimeError("the answer has no end")
    return Answer(1000 * (first_at - asked_at), timings)


@dataclass(frozen=True, slots=True)
class Pair:
    """The same length asked of both, one right after the other."""

    disaggregated: Answer
    colocated: Answer

    @property
    def added_ms(self) -> float:
        return self.disaggregated.ttft_ms - self.colocated.ttft_ms


def row(num_tokens: int, pairs: Sequence[Pair]) -> tuple[str, ...]:
    ours, one = [pair.disaggregated for pair in pairs], [pair.colocated for pair in pairs]
    added_ms = median(pair.added_ms for pair in pairs)
    one_ms = median(each.ttft_ms for each in one)
    prefill_ms = median(each.timings.prefill_ms for each in ours)
    return (
        str(num_tokens),
        f"{median(each.ttft_ms for each in ours):.1f}",
        f"{one_ms:.1f}",
        f"{added_ms:.1f}",
        f"{100 * added_ms / one_ms:.1f} %",
        f"{1000 * num_tokens / prefill_ms:.0f}",
        f"{median(each.timings.transfer_bytes for each in ours) / 1e6:.1f}",
        f"{median(each.timings.transfer_ms for each in ours):.1f}",
        f"{median(each.timings.mean_itl_ms for each in ours):.1f}",
        f"{median(each.timings.mean_itl_ms for each in one):.1f}",
    )


async def measure(
    addresses: Sequence[str], lengths: Sequence[int], rounds: int, max_tokens: int
) -> list[tuple[str, ...]]:
    rng = random.Random(0)
    pairs: dict[int, list[Pair]] = {length: [] for length in lengths}
    async with Client(addresses[0]) as disaggregated, Client(addresses[1]) as colocated:
        clients = [disaggregated, colocated]

        async def pair(length: int, is_turned: bool) -> Pair:
            answers = {}
            for index in (1, 0) if is_turned else (0, 1):
                prompt = [rng.randrange(1000, 20000) for _ in range(length)]
                answers[index] = await ask(clients[index], prompt, max_tokens)
            return Pair(answers[0], answers[1])

        for length in (*lengths, *[WARM_TOKENS] * NUM_WARM):  # connections, first touches
            await pair(length, is_turned=False)
        work = [(length, number) for number in range(rounds) for length in lengths]
        for length, number in track(work, "requests", console=Console(stderr=True), transient=True):
            pairs[length].append(await pair(length, is_turned=number % 2 == 1))
    return [row(length, pairs[length]) for length in lengths]


@contextmanager
def clusters(transport: str) -> Iterator[list[str]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(own_cluster(part, _config(roles, transport), lambda what: _say(f"{what} …")))
            for part, roles in POOLS.items()
        ]


def _config(roles: Sequence[str], transport: str) -> Mapping[str, object]:
    return {
        "pools": {role: {"threads": 1, "engine": {"kv_cache": KV_CACHE}} for role in roles},
        "model": {"max_model_len": 4096},
        "kv_transfer": {"transport": transport},
    }


def _say(what: str) -> None:
    print(what, file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--addresses", nargs=2, metavar="HOST:PORT", help="routers of two that run")
    parser.add_argument("--tokens", default="16,128,512,2048", help="prompt lengths (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="pairs of each length (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=32, help="answer length (default: %(default)s)")
    parser.add_argument("--transport", default="auto", help="(default: %(default)s)")
    options = parser.parse_args()
    lengths = [int(each) for each in options.tokens.split(",")]
    with ExitStack() as stack:
        addresses = options.addresses or stack.enter_context(clusters(options.transport))
        rows = asyncio.run(measure(addresses, lengths, options.rounds, options.max_tokens))
    for cells in (HEADINGS, ("---",) * len(HEADINGS), *rows):
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    sys.exit(tidily(main))
