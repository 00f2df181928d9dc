from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import pytest

from pdserve.v1.errors import ResourceExhausted, Unavailable
from router.fanout import merged, numbered_from
from router.outputs import Delta, Output
from router.text.transcript import Piece


def delta(index: int, token_id: int) -> Delta:
    return Delta(index, Piece("", (token_id,), ()))


class Streams:
    """Streams of numbered deltas; knows which are open."""

    def __init__(self) -> None:
        self.num_open = 0
        self.num_made = 0

    async def make(
        self, index: int, length: int, error: Exception | None = None
    ) -> AsyncGenerator[Output, None]:
        self.num_open += 1
        try:
            for token_id in range(length):
                await asyncio.sleep(0)
                self.num_made += 1
                yield delta(index, token_id)
            if error is not None:
                raise error
        finally:
            self.num_open -= 1

    async def wait(self, error: Exception | None = None) -> AsyncGenerator[Output, None]:
        """For ever; `error` is what it makes of a cancel."""
        self.num_open += 1
        try:
            await asyncio.Event().wait()
            yield delta(0, 0)
        except asyncio.CancelledError:
            if error is not None:
                raise error from None
            raise
        finally:
            self.num_open -= 1


def ids_by_index(outputs: Sequence[Output]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for output in outputs:
        assert isinstance(output, Delta)
        found.setdefault(output.index, []).extend(output.piece.token_ids)
    return found


async def test_all_outputs_come_and_each_streams_in_order() -> None:
    streams = Streams()
    outputs = [output async for output in merged([streams.make(index, 20 * index) for index in range(4)])]
    assert ids_by_index(outputs) == {index: list(range(20 * index)) for index in range(1, 4)}
    assert streams.num_open == 0


async def test_a_failure_comes_behind_the_outputs_before_it_and_ends_all() -> None:
    streams = Streams()
    seen: list[Output] = []

    async def take() -> None:
        async for output in merged([streams.make(0, 3, Unavailable("gone")), streams.wait()]):
            seen.append(output)

    with pytest.raises(Unavailable):
        await take()
    assert ids_by_index(seen) == {0: [0, 1, 2]}
    assert streams.num_open == 0


async def test_closing_early_closes_every_stream() -> None:
    streams = Streams()
    async with aclosing(merged([streams.make(0, 1000), streams.make(1, 1000), streams.wait()])) as outputs:
        async for _ in outputs:
            break
    assert streams.num_open == 0


async def test_a_slow_reader_holds_the_streams_back() -> None:
    streams = Streams()
    async with aclosing(merged([streams.make(index, 1000) for index in range(3)])) as outputs:
        async for _ in outputs:
            for _ in range(100):
                await asyncio.sleep(0)
            break
        assert streams.num_made < 12


async def test_what_a_stream_says_of_a_cancel_is_told() -> None:
    streams = Streams()

    async def take() -> None:
        async for _ in merged([streams.wait(), streams.wait(ResourceExhausted("no room in time"))]):
            pass

    taking = asyncio.ensure_future(take())
    await asyncio.sleep(0.01)
    taking.cancel()
    with pytest.raises(ResourceExhausted):
        await taking
    assert streams.num_open == 0


async def test_indices_count_from_where_they_are_told() -> None:
    streams = Streams()
    outputs = [output async for output in numbered_from(6, streams.make(1, 2))]
    assert ids_by_index(outputs) == {7: [0, 1]}
