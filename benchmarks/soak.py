"""A cluster under mixed load for minutes or hours, while workers are killed, stopped, scaled and drained
at random and clients cancel. It tells whether anything fails, differs, leaks or grows.

    python -m benchmarks.soak --minutes 30
    python -m benchmarks.soak --minutes 5 --model tiny --json soak.json

A catalogue of seeded requests is answered first by the undisturbed cluster, in float32; every answer of
the soak is compared with that. At the end the load stops, and then nothing may be held on any worker.
Memory is told by process, as a slope behind its warm-up: a leak shows as one that goes on. Ctrl-C ends
the soak early, and tells what was found until then. Exit code 1 on any failed request, other token, thing
still held, or pool that is not whole again, which ends the soak too.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from rich.table import Table

from benchmarks.under_faults.answers import End, answered
from benchmarks.under_faults.asks import Ask, Sizes, mixed, warm_up
from benchmarks.under_faults.growth import Growth, Memory, held
from benchmarks.under_faults.load import Load
from benchmarks.under_faults.options import parser
from benchmarks.under_faults.processes import router_and_controller
from benchmarks.under_faults.report import RunReport, print_report, report, write_json
from benchmarks.under_faults.right import compare
from benchmarks.under_faults.serving import TINY, Served, served
from benchmarks.under_faults.shown import console, shown
from benchmarks.under_faults.troubles import Cluster, NotWhole, Trouble
from pdserve import Client
from pdserve.bench.interrupted import tidily
from pdserve.client import PdserveError, Role, WorkerState

_CANCEL_SHARE = 0.1
_LOOK_S = 5.0
# After the load: leases end, releases are told.
_IDLE_S = 60.0
_SIZES = {TINY: Sizes(prompt=(16, 1200), output=(50, 500))}


@dataclass(frozen=True, slots=True)
class SoakReport:
    run: RunReport
    growths: tuple[Growth, ...]
    # By worker, though nothing ran any more.
    held: Mapping[str, str]
    # The trouble that the cluster did not come out of, which ended the soak; empty: there was none.
    broken: str

    @property
    def is_good(self) -> bool:
        return not (self.run.num_failed or self.run.num_wrong or self.held or self.broken)


class Soak:
    def __init__(
        self, where: Served, client: Client, options: argparse.Namespace, asks: Sequence[Ask]
    ) -> None:
        self._where = where
        self._client = client
        self._options = options
        self._asks = asks
        self._dice = random.Random(options.seed)
        self._cluster = Cluster(client, self._dice)
        self._targets = {Role.PREFILL: options.prefill, Role.DECODE: options.decode}
        self._memory = Memory()
        self._troubles: list[Trouble] = []
        self._over = asyncio.Event()
        self._broken = ""

    async def run(self) -> SoakReport:
        await warm_up(self._client, self._asks[:4], self._options.timeout)
        undisturbed = await self._undisturbed()
        with shown("soaking", None) as done:
            load = Load(self._where.address, self._options.clients, self._options.timeout, done)
            began = time.monotonic()
            self._end_in(60 * self._options.minutes)
            clients = [self._ask(load, number) for number in range(self._options.clients)]
            watching = asyncio.ensure_future(self._watch_memory())
            await asyncio.gather(self.make_trouble(), *clients)
            ended = time.monotonic()
            watching.cancel()
        still_held = await self._held_when_idle()
        comparison = await asyncio.to_thread(compare, load.answers, undisturbed, self._where.folder)
        told = report(load.answers, comparison, self._troubles, began, ended)
        return SoakReport(told, tuple(self._memory.growths()), still_held, self._broken)

    def _end_in(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(seconds, self._over.set)
        loop.add_signal_handler(signal.SIGTERM, self._over.set)
        loop.add_signal_handler(signal.SIGINT, self._end_early)

    def _end_early(self) -> None:
        """Who presses Ctrl-C again does not wait for the report."""
        self._over.set()
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)

    async def _undisturbed(self) -> Mapping[int, Sequence[int]]:
        with shown("undisturbed", len(self._asks)) as done:
            quiet = Load(self._where.address, self._options.clients, self._options.timeout, done)
            await quiet.ask_all(self._asks)
        failed = [answer.error for answer in quiet.answers if answer.end is not End.WHOLE]
        if failed:
            raise SystemExit(f"even undisturbed {len(failed)} requests failed: {failed[0]}")
        return {answer.ask.number: answer.ids for answer in quiet.answers}

    async def _ask(self, load: Load, number: int) -> None:
        dice = random.Random(f"{self._options.seed}/{number}")
        async with Client(self._where.address) as client:
            while not self._over.is_set():
                is_cancelled = dice.random() < _CANCEL_SHARE
                cancel_after_s = dice.expovariate(2.0) if is_cancelled else None
                ask = dice.choice(self._asks)
                load.note(await answered(client, ask, self._options.timeout, cancel_after_s))

    async def make_trouble(self) -> None:
        """Until it is over, or a pool is not whole again: that ends the soak, and is told with the rest."""
        while not self._over.is_set():
            pause_s = self._dice.uniform(0.5, 1.5) * self._options.trouble_every
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._over.wait(), pause_s)
                return
            try:
                self._troubles.append(await self._one())
            except NotWhole as error:
                self._broken = str(error)
                self._over.set()
                return
            console.log(self._troubles[-1].what)

    async def _one(self) -> Trouble:
        role = self._dice.choice(list(self._targets))
        # Stops are rare: each takes the controller's whole patience.
        kind = self._dice.choices(["kill", "stop", "scale", "drain"], weights=[5, 1, 3, 2])[0]
        if kind == "kill":
            return await self._cluster.kill(role)
        if kind == "stop":
            return await self._cluster.stop(role)
        if kind == "drain":
            return await self._cluster.drain(role)
        start = self._targets[role]
        up = await self._cluster.scale(role, start + 1)
        down = await self._cluster.scale(role, start)
        return Trouble(f"{up.what} and back", up.at, up.whole_again_s + down.whole_again_s)

    async def _watch_memory(self) -> None:
        while True:
            with suppress(PdserveError):
                for worker in await self._cluster.workers():
                    if worker.state is WorkerState.READY:  # one that loads grows, as it should
                        self._memory.note(worker.id, worker.pid)
            for name, pid in router_and_controller(self._where.address).items():
                self._memory.note(name, pid)
            await asyncio.sleep(_LOOK_S)

    async def _held_when_idle(self) -> Mapping[str, str]:
        deadline = time.monotonic() + _IDLE_S
        while True:
            found = held(await self._cluster.workers())
            if not found or time.monotonic() > deadline:
                return found
            await asyncio.sleep(1.0)


def print_growths(growths: Sequence[Growth]) -> None:
    table = Table(title="memory of its own", title_justify="left")
    for title in ("process", "samples", "first MiB", "last MiB", "MiB an hour", "mapped MiB"):
        table.add_column(title, justify="left" if title == "process" else "right")
    for each in growths:
        slope = "?" if each.mib_per_hour is None else f"{each.mib_per_hour:+.1f}"
        sizes = (f"{mib:.0f}" for mib in (each.first_mib, each.last_mib))
        table.add_row(each.name, str(each.num_samples), *sizes, slope, f"{each.last_mapped_mib:.0f}")
    console.print(table)


def arguments() -> argparse.Namespace:
    made = parser("soak", __doc__, num_workers=2)
    made.add_argument("--minutes", type=float, default=30.0)
    made.add_argument("--catalogue", type=int, default=100, help="how many different requests")
    made.add_argument("--trouble-every", type=float, default=15.0, help="seconds, on average")
    return made.parse_args()


async def soak(where: Served, options: argparse.Namespace, asks: Sequence[Ask]) -> SoakReport:
    async with Client(where.address) as client:
        return await Soak(where, client, options, asks).run()


def main() -> int:
    options = arguments()
    asks = mixed(options.catalogue, _SIZES.get(options.model, Sizes()), options.seed)
    replicas = {"prefill": options.prefill, "decode": options.decode}
    with served(options.model, replicas, options.kv_cache, options.transport, console.log) as where:
        told = asyncio.run(soak(where, options, asks))
    print_report(told.run, console)
    print_growths(told.growths)
    for name, what in told.held.items():
        console.print(f"{name} still holds {what}")
    if told.broken:
        console.print(f"ended early: {told.broken}")
    if options.json is not None:
        write_json(options.json, told)
    return 0 if told.is_good else 1


if __name__ == "__main__":
    sys.exit(tidily(main))
