"""How large frames, how wide a window and how many channels suit each transport, between two processes of
this machine.

    python benchmarks/kv_sweep.py
    python benchmarks/kv_sweep.py --transports grpc --tokens 1000 --rounds 20

First frame sizes and windows, for one transfer at a time; then channels, for four at once. In every round
each choice has its turn, so that a machine whose speed drifts drifts for all of them. Prints Markdown tables
of medians, and for each transport the choice that is best over all lengths beside the one that is built in.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from statistics import median

from rich.console import Console
from rich.progress import Progress

from kv_transfer.layout import KVLayout
from kv_transfer.send_queue import SenderConfig
from pdserve.bench.raw_transfer import RawBench, raw_bench
from pdserve.bench.transfer_ends import TRANSPORTS

LAYOUT = KVLayout(30, 3, 64, 16, "bfloat16", "")  # SmolLM2-135M's
MIB = 2**20
FRAMES = {"shm": (1, 2, 4, 8, 16), "collective": (1, 2, 4, 8, 16), "grpc": (0.5, 1, 2, 4)}  # MiB
WINDOWS = (2, 4, 8, 16)  # frames
CHANNELS = (1, 2, 4)
NUM_AT_ONCE = 4

# GB/s of one choice, by length of the prompt.
Rates = dict[int, float]


def frame_choices(transport: str) -> dict[str, SenderConfig]:
    """By name; "built in" is what a sender takes that is told nothing."""
    choices = {"built in": SenderConfig()}
    for frame in FRAMES[transport]:
        frame_bytes = int(frame * MIB)
        for window in WINDOWS:
            name = f"{frame:g} MiB, {window} frames"
            choices[name] = SenderConfig(frame_bytes=frame_bytes, window_bytes=window * frame_bytes)
    return choices


def channel_choices() -> dict[str, SenderConfig]:
    return {f"{number} channels": SenderConfig(num_channels=number) for number in CHANNELS}


def measure(
    bench: RawBench,
    choices: dict[str, SenderConfig],
    tokens: Sequence[int],
    rounds: int,
    count: int,
    tell: Callable[[], None],
) -> dict[str, Rates]:
    """`count` transfers together in each turn."""
    seconds: dict[tuple[str, int], list[float]] = {}
    for number in range(rounds + 1):  # the first touches memory
        for name, config in choices.items():
            bench.ship_s(LAYOUT.num_blocks_for(tokens[0]), count, at_once=True, config=config)  # it connects
            for num_tokens in tokens:
                took = bench.ship_s(LAYOUT.num_blocks_for(num_tokens), count, at_once=True, config=config)
                if number > 0:
                    seconds.setdefault((name, num_tokens), []).extend(took)
            tell()
    return {
        name: {
            each: count * LAYOUT.num_blocks_for(each) * LAYOUT.block_bytes / median(seconds[name, each]) / 1e9
            for each in tokens
        }
        for name in choices
    }


def overall(rates: Rates) -> float:
    """The geometric mean over the lengths: none of them outweighs the others."""
    return prod(rates.values()) ** (1 / len(rates))


def table(transport: str, rates: dict[str, Rates], tokens: Sequence[int]) -> None:
    print(f"\n| {transport} | {' | '.join(f'{each} tokens' for each in tokens)} | overall |")
    print("|---|" + "---|" * (len(tokens) + 1))
    for name, each in rates.items():
        print(f"| {name} | {' | '.join(f'{each[number]:.2f}' for number in tokens)} | {overall(each):.2f} |")
    best = max(rates, key=lambda name: overall(rates[name]))
    first = next(iter(rates))
    print(f"\nbest: {best}, {overall(rates[best]) / overall(rates[first]) - 1:+.1%} over {first}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transports", default=",".join(TRANSPORTS))
    parser.add_argument("--tokens", default="64,1000,4000")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--part", choices=("all", "frames", "channels"), default="all")
    asked = parser.parse_args()
    tokens = [int(number) for number in asked.tokens.split(",")]
    print("GB/s; one transfer at a time for frames and windows, four for channels")
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for transport in asked.transports.split(","):
            parts = {"frames": (frame_choices(transport), 1), "channels": (channel_choices(), NUM_AT_ONCE)}
            for part, (choices, count) in parts.items():
                if asked.part not in ("all", part):
                    continue
                bar = progress.add_task(f"{transport} {part}", total=(asked.rounds + 1) * len(choices))
                blocks = LAYOUT.num_blocks_for(max(tokens))
                with raw_bench(transport, LAYOUT, blocks, count) as bench:
                    tell = partial(progress.advance, bar)
                    rates = measure(bench, choices, tokens, asked.rounds, count, tell)
                table(transport, rates, tokens)


if __name__ == "__main__":
    main()
