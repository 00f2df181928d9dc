"""One request at a time on clusters that run: where its time goes, and what shipping its KV adds.

    pdserve up cluster_configs/local-cpu.yaml
    pdserve up cluster_configs/colocated-cpu.yaml
    python benchmarks/unloaded.py 127.0.0.1:50051 127.0.0.1:50053

The clusters take turns, prompt by prompt, so that a machine whose speed drifts drifts for all of them.
Every prompt is new to the prefix caches. Prints a Markdown table of medians.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from contextlib import AsyncExitStack
from statistics import median

from rich.console import Console
from rich.progress import track

from pdserve import Client
from pdserve.client import Generation

HEADINGS = ("cluster", "prompt", "TTFT ms", "prefill tok/s", "KV MB", "transfer ms", "ITL ms")


async def ask(client: Client, num_tokens: int, max_tokens: int, rng: random.Random) -> Generation:
    prompt = [rng.randrange(1000, 20000) for _ in range(num_tokens)]
    return await client.generate(prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True)


def row(name: str, num_tokens: int, answers: list[Generation]) -> tuple[str, ...]:
    timings = [answer.timings for answer in answers]
    prefill_ms = median(each.prefill_ms for each in timings)
    return (
        name,
        str(num_tokens),
        f"{median(each.ttft_ms for each in timings):.0f}",
        f"{1000 * num_tokens / prefill_ms:.0f}",
        f"{median(each.transfer_bytes for each in timings) / 1e6:.1f}",
        f"{median(each.transfer_ms for each in timings):.1f}",
        f"{median(each.mean_itl_ms for each in timings):.1f}",
    )


async def run(
    addresses: list[str], lengths: list[int], rounds: int, max_tokens: int
) -> list[tuple[str, ...]]:
    rng = random.Random(0)
    answers: dict[tuple[str, int], list[Generation]] = {}
    async with AsyncExitStack() as stack:
        clients = {address: await stack.enter_async_context(Client(address)) for address in addresses}
        for client in clients.values():
            await ask(client, 64, 8, rng)  # connections, first touches
        work = [(length, address) for _ in range(rounds) for length in lengths for address in addresses]
        for length, address in track(work, "requests", console=Console(stderr=True), transient=True):
            answer = await ask(clients[address], length, max_tokens, rng)
            answers.setdefault((address, length), []).append(answer)
    first = {address: answers[address, lengths[0]][0] for address in addresses}
    names = {a: f"{f.prefill_worker} → {f.decode_worker}" for a, f in first.items()}
    return [row(names[a], length, answers[a, length]) for length in lengths for a in addresses]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("addresses", nargs="+", metavar="HOST:PORT", help="routers to ask in turn")
    parser.add_argument("--tokens", default="16,128,512,2048", help="prompt lengths (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=5, help="requests of each length (default: %(default)s)"
    )
    parser.add_argument("--max-tokens", type=int, default=32, help="answer length (default: %(default)s)")
    options = parser.parse_args()
    lengths = [int(each) for each in options.tokens.split(",")]
    rows = asyncio.run(run(options.addresses, lengths, options.rounds, options.max_tokens))
    for cells in (HEADINGS, ("---",) * len(HEADINGS), *rows):
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
