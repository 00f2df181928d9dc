"""How many of 800 requests succeed when workers die under them: 8 clients ask 100 each, one after the
other.

    python -m benchmarks.lost_requests                      # 1P1D, the packaged model, about ten minutes
    python -m benchmarks.lost_requests --prefill 2 --decode 2 --json lost.json
    python -m benchmarks.lost_requests --model tiny         # random weights: two minutes

In a public test of a comparable system (8 clients, 100 requests each, the only decode worker of 1P1D
killed) 200 of 800 succeeded, and 798 with the prefill worker killed. Here a cluster of this command's
own (`pdserve up`) first answers all requests undisturbed, in float32 and with a seed each. Then it is
asked again while the busiest decode and the busiest prefill worker are killed twice, each pool is
scaled up and back, and a decode worker is stopped (SIGSTOP). A pause is the time between two deliveries
of one stream. Exit code 1 if any request failed or had other tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from benchmarks.under_faults.answers import End
from benchmarks.under_faults.asks import Ask, Sizes, mixed, warm_up
from benchmarks.under_faults.load import Load
from benchmarks.under_faults.options import parser
from benchmarks.under_faults.report import RunReport, print_report, report, write_json
from benchmarks.under_faults.right import compare
from benchmarks.under_faults.serving import TINY, Served, served
from benchmarks.under_faults.shown import console, shown
from benchmarks.under_faults.troubles import Cluster, Trouble
from pdserve import Client
from pdserve.bench.interrupted import tidily
from pdserve.client import Role

# How far, as shares of all requests, clients may be ahead of a trouble that is still to come.
_AHEAD = 0.05
# Random weights take a hundredth of the packaged model's time, so answers are longer.
_SIZES = {TINY: Sizes(prompt=(16, 1200), output=(200, 700))}


@dataclass(frozen=True, slots=True)
class Planned:
    # Share of all requests that have ended.
    when: float
    act: Callable[[Cluster], Awaitable[Trouble]]


def plan(num_prefill: int, num_decode: int) -> list[Planned]:
    prefill, decode = Role.PREFILL, Role.DECODE
    return [
        Planned(0.06, lambda cluster: cluster.kill(decode)),
        Planned(0.16, lambda cluster: cluster.kill(prefill)),
        Planned(0.26, lambda cluster: cluster.scale(decode, num_decode + 1)),
        Planned(0.36, lambda cluster: cluster.scale(decode, num_decode)),
        Planned(0.46, lambda cluster: cluster.kill(decode)),
        Planned(0.56, lambda cluster: cluster.kill(prefill)),
        Planned(0.66, lambda cluster: cluster.scale(prefill, num_prefill + 1)),
        Planned(0.76, lambda cluster: cluster.scale(prefill, num_prefill)),
        Planned(0.86, lambda cluster: cluster.stop(decode)),
    ]


class Troublemaker:
    """One trouble after the other, each when so many requests have ended and the pools are whole again."""

    def __init__(self, cluster: Cluster, planned: Sequence[Planned], num_requests: int) -> None:
        self.troubles: list[Trouble] = []
        self._cluster = cluster
        self._planned = planned
        self._num_requests = num_requests
        self._num_begun = 0
        self._changed = asyncio.Condition()

    async def gate(self, num_done: int) -> None:
        """Clients do not run away from what is to happen to them."""
        async with self._changed:
            self._changed.notify_all()
            await self._changed.wait_for(lambda: num_done <= self._limit())

    async def run(self, load: Load) -> None:
        for planned in self._planned:
            async with self._changed:
                await self._changed.wait_for(lambda: len(load.answers) >= planned.when * self._num_requests)  # noqa: B023
            acting = asyncio.ensure_future(planned.act(self._cluster))
            # Begun, not over: what it does is met by requests under way.
            async with self._changed:
                self._num_begun += 1
                self._changed.notify_all()
            self.troubles.append(await acting)
            console.log(
                f"{self.troubles[-1].what}; whole again after {self.troubles[-1].whole_again_s:.1f} s"
            )

    def _limit(self) -> float:
        if self._num_begun == len(self._planned):
            return self._num_requests
        return (self._planned[self._num_begun].when + _AHEAD) * self._num_requests


async def under_troubles(load: Load, asks: Sequence[Ask], maker: Troublemaker) -> float:
    """When the last request ended. Raises what a trouble failed with, for clients wait for the next one."""

    async def ask_all() -> float:
        await load.ask_all(asks, maker.gate)
        return time.monotonic()

    ended, _ = await asyncio.gather(ask_all(), maker.run(load))
    return ended


async def measure(where: Served, options: argparse.Namespace, asks: Sequence[Ask]) -> RunReport:
    async with Client(where.address) as client:
        await warm_up(client, asks[:4], options.timeout)
        with shown("undisturbed", len(asks)) as done:
            quiet = Load(where.address, options.clients, options.timeout, done)
            await quiet.ask_all(asks)
        failed = [answer.error for answer in quiet.answers if answer.end is not End.WHOLE]
        if failed:
            raise SystemExit(f"even undisturbed {len(failed)} requests failed: {failed[0]}")
        undisturbed = {answer.ask.number: answer.ids for answer in quiet.answers}
        maker = Troublemaker(
            Cluster(client, random.Random(options.seed)), plan(options.prefill, options.decode), len(asks)
        )
        with shown("under faults", len(asks)) as done:
            load = Load(where.address, options.clients, options.timeout, done)
            began = time.monotonic()
            ended = await under_troubles(load, asks, maker)
    comparison = await asyncio.to_thread(compare, load.answers, undisturbed, where.folder)
    return report(load.answers, comparison, maker.troubles, began, ended)


def arguments() -> argparse.Namespace:
    made = parser("lost_requests", __doc__, num_workers=1)
    made.add_argument("--requests", type=int, default=100, help="of each client")
    return made.parse_args()


def main() -> int:
    options = arguments()
    asks = mixed(options.clients * options.requests, _SIZES.get(options.model, Sizes()), options.seed)
    replicas = {"prefill": options.prefill, "decode": options.decode}
    with served(options.model, replicas, options.kv_cache, options.transport, console.log) as where:
        told = asyncio.run(measure(where, options, asks))
    print_report(told, console)
    if options.json is not None:
        write_json(options.json, told)
    return 0 if told.num_whole == told.num_requests and not told.num_wrong else 1


if __name__ == "__main__":
    sys.exit(tidily(main))
