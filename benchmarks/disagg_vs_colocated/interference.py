"""Streams that are being written while long prompts arrive.

Some streams run all the time: as one answer ends, the next is asked for. First it is quiet, then a long
prompt comes at every tick of a clock. What a stream feels are the gaps between its tokens: the wait for the
first token of its next answer is none of them and is told apart. The control are the same streams on the same
1P1D, beside a process that prefills as long prompts at the same times and is connected to nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import cast

from benchmarks.disagg_vs_colocated.cores import confined
from benchmarks.disagg_vs_colocated.engine_child import EngineChild, engine_child
from benchmarks.disagg_vs_colocated.engine_process import Order, Settings
from benchmarks.disagg_vs_colocated.results import Results, as_rows, from_rows
from benchmarks.disagg_vs_colocated.settings import MODEL, Sizes, System, Wanted
from benchmarks.disagg_vs_colocated.shown import Shown
from benchmarks.disagg_vs_colocated.streams import Streams
from benchmarks.disagg_vs_colocated.systems import Open
from pdserve.bench.serve.client import ServeClient
from pdserve.bench.serve.prompts import TokenPrompts
from pdserve.bench.serve.records import RequestRecord
from pdserve.bench.serve.run import run
from pdserve.bench.serve.workload import PlannedRequest, Workload

EVERY_KEY = "interference/every_s"
CONTROL = "control"
# Of the time between two long prompts, the most that one takes alone: 3.4 s of 4 s, where this was planned. A
# slower core gets them as much more seldom, or what is measured is its queue.
_MOST_BUSY = 0.85
# Prompts are never asked for twice: each use of them has keys of its own.
_ALONE, _LONG, _STREAM = range(3)


@dataclass(frozen=True, slots=True)
class Segment:
    """Seconds since its begin. `longs` is empty for the control, `prefills_s` for all others."""

    quiet_s: tuple[float, float]
    loaded_s: tuple[float, float]
    streams: tuple[RequestRecord, ...]
    longs: tuple[RequestRecord, ...]
    prefills_s: tuple[float, ...]  # each took so long


def alone_key(system: System) -> str:
    return f"interference/{system.value}/alone"


def segment_keys(who: str, sizes: Sizes) -> list[str]:
    """`who`: a system's name, or CONTROL."""
    return [f"interference/{who}/{number}" for number in range(sizes.num_segments)]


def keys(system: System, sizes: Sizes) -> list[str]:
    controls = segment_keys(CONTROL, sizes) if system is System.DISAGGREGATED else []
    return [alone_key(system), *segment_keys(system.value, sizes), *controls]


def segments(results: Results, who: str, sizes: Sizes) -> list[Segment]:
    """Those that were measured."""
    points = [results.get(key) for key in segment_keys(who, sizes)]
    return [_segment(cast("dict[str, object]", point)) for point in points if point is not None]


def _segment(point: dict[str, object]) -> Segment:
    quiet, loaded = (cast("list[float]", point[name]) for name in ("quiet_s", "loaded_s"))
    streams, longs = (tuple(from_rows(point[name])) for name in ("streams", "longs"))
    prefills_s = tuple(cast("list[float]", point["prefills_s"]))
    return Segment((quiet[0], quiet[1]), (loaded[0], loaded[1]), streams, longs, prefills_s)


def alone(results: Results, system: System) -> list[RequestRecord]:
    """Long prompts with nothing beside them."""
    point = results.get(alone_key(system))
    return [] if point is None else from_rows(point)


async def measure(results: Results, system: System, open_client: Open, wanted: Wanted, shown: Shown) -> None:
    """Every point that the file lacks. Raises BenchError."""
    async with open_client() as client:
        prompts = TokenPrompts((await client.served()).vocab_size or 30_000, seed=12)
        measuring = _Measuring(results, system, client, prompts, wanted.sizes, shown)
        await measuring.alone()
        every_s = results.number(EVERY_KEY, lambda: fitting_interval_s(results, system, wanted.sizes))
        whole = segment_keys(system.value, wanted.sizes)
        if system is not System.DISAGGREGATED:
            for key in whole:
                await measuring.segment(key, every_s, None)
            return
        controls = segment_keys(CONTROL, wanted.sizes)
        if all(key in results for key in controls):
            for key in whole:
                await measuring.segment(key, every_s, None)
            for _ in controls:
                shown.skip()
            return
        settings = Settings(MODEL, wanted.sizes.long_tokens[0] + 64, 1, None)
        with confined(wanted.cores), engine_child(settings) as child:
            await asyncio.to_thread(child.do, Order(wanted.sizes.long_tokens[0]))  # first touches
            # By turns: this machine's speed drifts for both.
            for key, control in zip(whole, controls, strict=True):
                await measuring.segment(key, every_s, None)
                await measuring.segment(control, every_s, child)


def fitting_interval_s(results: Results, system: System, sizes: Sizes) -> float:
    """As long as planned, or as long as this machine needs to keep up."""
    ttfts = [record.ttft_s for record in alone(results, system) if record.ttft_s is not None]
    return max(sizes.long_every_s, round(median(ttfts) / _MOST_BUSY, 1) if ttfts else 0.0)


class _Measuring:
    def __init__(
        self,
        results: Results,
        system: System,
        client: ServeClient,
        prompts: TokenPrompts,
        sizes: Sizes,
        shown: Shown,
    ) -> None:
        self._results = results
        self._system = system
        self._client = client
        self._prompts = prompts
        self._sizes = sizes
        self._shown = shown

    async def alone(self) -> None:
        key = alone_key(self._system)
        if key in self._results:
            self._shown.skip()
            return
        point = self._shown.begin(f"{self._system.value}: long prompts alone", self._sizes.num_alone)
        done: list[RequestRecord] = []
        for number in range(self._sizes.num_alone):
            workload = Workload("alone", (self._long(_ALONE, number, 0.0),))
            done += await run(workload, self._client, point)
        self._results.put(key, as_rows(done))
        self._shown.done(f"{self._system.value}: long prompts alone")

    async def segment(self, key: str, every_s: float, control: EngineChild | None) -> None:
        """`control`: who prefills in the place of the system."""
        if key in self._results:
            self._shown.skip()
            return
        sizes = self._sizes
        self._shown.begin(f"{key}: quiet for {sizes.quiet_s:g} s, then {sizes.num_long} long prompts")
        streams = Streams(self._client, sizes.num_streams, lambda number: self._stream(key, number))
        began = time.monotonic()
        await streams.begin()
        try:
            quiet = await _elapse(streams, began, lambda: asyncio.sleep(sizes.quiet_s))
            longs: list[RequestRecord] = []
            prefills_s: list[float] = []

            async def load() -> None:
                if control is None:
                    longs.extend(await self._ask_long(key, every_s, began))
                else:
                    prefills_s.extend(await _prefill_long(control, sizes, every_s))

            loaded_at = time.monotonic() - began
            await _elapse(streams, began, load)
        finally:
            records = await streams.end(began)
        self._results.put(
            key,
            {
                "quiet_s": quiet,
                "loaded_s": (loaded_at, loaded_at + sizes.num_long * every_s),
                "streams": as_rows(records),
                "longs": as_rows(longs),
                "prefills_s": prefills_s,
            },
        )
        self._shown.done(f"{key}: measured")

    async def _ask_long(self, key: str, every_s: float, began: float) -> list[RequestRecord]:
        number = self._sizes.num_long
        requests = tuple(self._long(_LONG, index, index * every_s, key) for index in range(number))
        shift_s = time.monotonic() - began
        asked = asyncio.create_task(run(Workload("long", requests), self._client))
        try:
            # The last one's time is as long as that of the others, though it may be done before.
            await asyncio.sleep(number * every_s)
            records = await asked
        finally:
            asked.cancel()
        return [_shifted(record, shift_s) for record in records]

    def _long(self, use: int, number: int, at_s: float, key: str = "") -> PlannedRequest:
        num_tokens, max_tokens = self._sizes.long_tokens
        prompt = self._prompts.make(num_tokens, use, number, *key.encode())
        return PlannedRequest(at_s, prompt, max_tokens, num_tokens)

    def _stream(self, key: str, number: int) -> PlannedRequest:
        num_tokens, max_tokens = self._sizes.stream_tokens
        prompt = self._prompts.make(num_tokens, _STREAM, number, *key.encode())
        return PlannedRequest(0.0, prompt, max_tokens, num_tokens)


async def _elapse(streams: Streams, began: float, what: Callable[[], Awaitable[None]]) -> tuple[float, float]:
    """From when till when it took. Raises what a stream died of."""
    from_s = time.monotonic() - began
    await what()
    streams.check()
    return from_s, time.monotonic() - began


async def _prefill_long(control: EngineChild, sizes: Sizes, every_s: float) -> list[float]:
    """How long each took, in seconds."""
    began = time.monotonic()
    took_s: list[float] = []
    for index in range(sizes.num_long):
        await asyncio.sleep(max(0.0, began + index * every_s - time.monotonic()))
        took_s.append(await asyncio.to_thread(control.do, Order(sizes.long_tokens[0])))
    await asyncio.sleep(max(0.0, began + sizes.num_long * every_s - time.monotonic()))
    return took_s


def _shifted(record: RequestRecord, by_s: float) -> RequestRecord:
    return replace(
        record,
        scheduled_s=record.scheduled_s + by_s,
        sent_s=record.sent_s + by_s,
        ended_s=record.ended_s + by_s,
        arrivals_s=tuple(each + by_s for each in record.arrivals_s),
    )
