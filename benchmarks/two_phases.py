"""Draws what prefill and decode are, from a real run: the picture in docs/how-it-works.md.

    python benchmarks/two_phases.py [--output docs/pictures/two-phases.png]

Starts 1P1D, takes one to two minutes, and ends it. Left: one request, by its own timings and by when its
tokens came. Right: tokens a second over the tokens that a step computes together: prompts of some lengths,
one at a time, by the prefill worker's clock, and some numbers of streams that decode at once, by their
client's. Prompts are random, so new to the prefix caches. Of each measurement the best of five: what disturbs
the machine can only slow it down.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from pdserve import Client
from pdserve.bench.interrupted import tidily
from pdserve.bench.own_cluster import own_cluster
from pdserve.client import Delta, Finished, Timings

PROMPTS = (16, 32, 64, 128, 256, 512)
STREAMS = (1, 2, 4, 8, 16, 32)
NUM_ROUNDS = 5
# Of the request on the left.
PROMPT_TOKENS, OUTPUT_TOKENS = 1000, 40
CONFIG = {"pools": {role: {"engine": {"kv_cache": "256MiB"}} for role in ("prefill", "decode")}}
PREFILL, SHIPPED, DECODE = "#4c72b0", "#ccb974", "#dd8452"


@dataclass(frozen=True, slots=True)
class Stream:
    timings: Timings
    # When each token came; milliseconds since the call.
    token_ms: Sequence[float]
    asked_at: float

    def token_at(self) -> Sequence[float]:
        return [self.asked_at + ms / 1000 for ms in self.token_ms]


@dataclass(frozen=True, slots=True)
class Measured:
    request: Stream
    # Tokens in a step → tokens a second.
    prefill: dict[int, float]
    decode: dict[int, float]


async def ask(client: Client, num_tokens: int, max_tokens: int, vocab_size: int) -> Stream:
    prompt = [random.randrange(vocab_size) for _ in range(num_tokens)]
    asked_at = time.perf_counter()
    came: list[float] = []
    timings: Timings | None = None
    async for event in client.generate_stream(prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True):
        if isinstance(event, Delta):
            came += [(time.perf_counter() - asked_at) * 1000] * len(event.token_ids)
        elif isinstance(event, Finished):
            timings = event.timings
    if timings is None:
        raise RuntimeError("an answer did not end")
    return Stream(timings, came, asked_at)


async def measure(address: str) -> Measured:
    async with Client(address) as client:
        vocab_size = (await client.get_model()).vocab_size

        async def one(num_tokens: int, max_tokens: int) -> Stream:
            return await ask(client, num_tokens, max_tokens, vocab_size)

        for _ in range(2):
            await one(PROMPT_TOKENS, 8)
        requests = [await one(PROMPT_TOKENS, OUTPUT_TOKENS) for _ in range(NUM_ROUNDS)]
        request = min(requests, key=lambda each: each.token_ms[-1])
        prefill = {}
        for num_tokens in PROMPTS:
            took = [(await one(num_tokens, 1)).timings.prefill_ms for _ in range(NUM_ROUNDS)]
            prefill[num_tokens] = num_tokens / min(took) * 1000
        decode = {}
        for num_streams in STREAMS:
            rates = []
            for _ in range(NUM_ROUNDS):
                rates.append(rate_of(await asyncio.gather(*(one(16, 64) for _ in range(num_streams)))))
            decode[num_streams] = max(rates)
        return Measured(request, prefill, decode)


def rate_of(streams: Sequence[Stream]) -> float:
    """Tokens a second of all, while all of them decode."""
    begin = max(stream.token_at()[1] for stream in streams)
    end = min(stream.token_at()[-1] for stream in streams)
    num_tokens = sum(begin < at <= end for stream in streams for at in stream.token_at())
    return num_tokens / (end - begin)


def draw(measured: Measured, path: Path) -> None:
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_request(left, measured.request)
    _draw_rates(right, measured)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _draw_request(axes: Axes, request: Stream) -> None:
    timings, first_ms = request.timings, request.token_ms[0]
    begun_ms = first_ms - timings.prefill_ms
    axes.barh(2, timings.prefill_ms, left=begun_ms, height=0.5, color=PREFILL)
    axes.text(
        begun_ms + timings.prefill_ms / 2, 2, f"{PROMPT_TOKENS} tokens", ha="center", va="center", color="w"
    )
    there_ms = first_ms + timings.handover_ms
    axes.barh(1, timings.transfer_ms, left=there_ms - timings.transfer_ms, height=0.5, color=SHIPPED)
    axes.text(
        there_ms - timings.transfer_ms / 2,
        1,
        f"{timings.transfer_bytes / 1e6:.0f} MB",
        ha="center",
        va="center",
    )
    axes.vlines(request.token_ms, -0.25, 0.25, color=DECODE)
    axes.set_yticks((2, 1, 0), ("prefill worker", "KV shipped", "tokens at the client"))
    axes.set_ylim(-0.5, 2.5)
    axes.set_xlim(left=0)
    axes.set_xlabel("ms since the request")
    axes.set_title(f"One request: {PROMPT_TOKENS} tokens in, {len(request.token_ms)} out")


def _draw_rates(axes: Axes, measured: Measured) -> None:
    axes.plot(
        *zip(*measured.decode.items(), strict=True), "o-", color=DECODE, label="decode: streams at once"
    )
    axes.plot(
        *zip(*measured.prefill.items(), strict=True), "s-", color=PREFILL, label="prefill: tokens of a prompt"
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.set_xlabel("tokens computed in one step")
    axes.set_ylabel("tokens/s")
    axes.set_title("The same weights, read once a step")
    axes.legend()


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw what prefill and decode are, from a real run.")
    parser.add_argument("--output", type=Path, default=Path("docs/pictures/two-phases.png"))
    options = parser.parse_args()
    with own_cluster("two-phases", CONFIG, Console(stderr=True).print) as address:
        measured = asyncio.run(measure(address))
    draw(measured, options.output)
    timings = measured.request.timings
    phases = f"prefill {timings.prefill_ms:.0f} ms, decode {timings.decode_ms:.0f} ms"
    hidden_share = timings.hidden_bytes / timings.transfer_bytes
    print(f"TTFT {timings.ttft_ms:.0f} ms, {phases}, {hidden_share:.0%} of the KV shipped by then")
    for title, rates in (("prefill", measured.prefill), ("decode", measured.decode)):
        print(f"{title} tokens/s: {', '.join(f'{count}: {rate:.0f}' for count, rate in rates.items())}")


if __name__ == "__main__":
    sys.exit(tidily(main))
