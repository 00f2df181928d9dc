"""Whatever bytes come, a parser takes them or refuses them in its own words: no other exception, no hang, and
nothing kept."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.faults.wire_parsers import PARSERS, Parser

MANY = 100_000
# Of one input of at most some hundred bytes; a backstop.
SLOW_S = 5.0
# Allocators keep some of what was freed.
GROWTH_BYTES = 48 << 20


def feed(parser: Parser, raw: bytes) -> bool:
    """Whether it was taken."""
    began = time.monotonic()
    try:
        parser.parse(raw)
    except parser.refusals:
        return False
    finally:
        assert time.monotonic() - began < SLOW_S, raw
    return True


# What is done to a good message: each takes dice and bytes.
def _flip(dice: random.Random, raw: bytearray) -> None:
    raw[dice.randrange(len(raw))] ^= 1 << dice.randrange(8)


def _overwrite(dice: random.Random, raw: bytearray) -> None:
    raw[dice.randrange(len(raw))] = dice.choice((0, 1, 0x7F, 0x80, 0xFF, dice.randrange(256)))


def _insert(dice: random.Random, raw: bytearray) -> None:
    at = dice.randrange(len(raw) + 1)
    raw[at:at] = dice.randbytes(dice.randrange(1, 9))


def _delete(dice: random.Random, raw: bytearray) -> None:
    at = dice.randrange(len(raw))
    del raw[at : at + dice.randrange(1, 9)]


def _repeat(dice: random.Random, raw: bytearray) -> None:
    at = dice.randrange(len(raw))
    raw[at:at] = raw[at : at + dice.randrange(1, 33)] * dice.randrange(1, 5)


def _cut(dice: random.Random, raw: bytearray) -> None:
    del raw[dice.randrange(len(raw)) :]


_CHANGES: Sequence[Callable[[random.Random, bytearray], None]] = (
    _flip,
    _overwrite,
    _insert,
    _delete,
    _repeat,
    _cut,
)


def spoilt(dice: random.Random, seeds: Sequence[bytes]) -> bytes:
    """A good message with some changes; or the beginning of one and the end of another; or noise."""
    kind = dice.random()
    if kind < 0.1:
        return dice.randbytes(dice.randrange(200))
    raw = bytearray(dice.choice(seeds))
    if kind < 0.2:
        other = dice.choice(seeds)
        raw = raw[: dice.randrange(len(raw) + 1)] + bytearray(other[dice.randrange(len(other) + 1) :])
    for _ in range(dice.choice((1, 1, 1, 2, 3, 8))):
        if raw:
            dice.choice(_CHANGES)(dice, raw)
    return bytes(raw)


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_good_messages_are_taken(parser: Parser) -> None:
    assert all(feed(parser, seed) for seed in parser.seeds)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_inputs", [500, pytest.param(MANY, marks=pytest.mark.full)])
@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_spoilt_messages_are_taken_or_refused_and_leave_nothing(parser: Parser, num_inputs: int) -> None:
    dice = random.Random(parser.name)
    for _ in range(num_inputs // 10):  # what a first use makes is there to stay
        feed(parser, spoilt(dice, parser.seeds))
    gc.collect()
    before = psutil.Process().memory_info().rss
    num_taken = sum(feed(parser, spoilt(dice, parser.seeds)) for _ in range(num_inputs))
    gc.collect()
    assert psutil.Process().memory_info().rss - before < GROWTH_BYTES
    # Else it would be the refusing alone that was tried.
    assert 0 < num_taken <= num_inputs


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_any_bytes_are_taken_or_refused(parser: Parser, data: st.DataObject) -> None:
    """Hypothesis finds the shortest ones that are neither."""
    whole = st.sampled_from(list(parser.seeds))
    cuts = st.tuples(whole, st.integers(0, 400), st.binary(max_size=12), st.integers(0, 400))
    made = cuts.map(lambda cut: cut[0][: cut[1]] + cut[2] + cut[0][cut[3] :])
    feed(parser, data.draw(st.one_of(st.binary(max_size=200), made)))
