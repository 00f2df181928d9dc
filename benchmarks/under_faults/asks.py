"""Requests whose answers are known in advance: each has a seed, so it has one right answer in float32."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.client import Client
from pdserve.requests import GenerateOptions

# Ids that every model of this size has as ordinary tokens.
_FIRST_ID, _LAST_ID = 1, 500


@dataclass(frozen=True, slots=True)
class Ask:
    number: int
    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    repetition_penalty: float

    @property
    def seed(self) -> int:
        return 1 + self.number

    def options(self) -> GenerateOptions:
        return GenerateOptions(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
            ignore_eos=True,
        )


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens, from and to."""

    prompt: tuple[int, int] = (16, 400)
    output: tuple[int, int] = (32, 160)


def mixed(num_asks: int, sizes: Sizes, seed: int) -> list[Ask]:
    """Lengths of all sizes; most are sampled, some are greedy, some have a penalty."""
    dice = random.Random(seed)
    return [_one(number, sizes, dice) for number in range(num_asks)]


def _one(number: int, sizes: Sizes, dice: random.Random) -> Ask:
    prompt = tuple(dice.randint(_FIRST_ID, _LAST_ID) for _ in range(dice.randint(*sizes.prompt)))
    return Ask(
        number,
        prompt,
        dice.randint(*sizes.output),
        temperature=0.0 if number % 4 == 0 else 0.9,
        repetition_penalty=1.1 if number % 5 == 0 else 1.0,
    )


async def warm_up(client: Client, asks: Sequence[Ask], timeout_s: float) -> None:
    """What a first request makes (connections, caches) is there afterwards."""
    for ask in asks:
        await client.generate(ask.prompt, timeout=timeout_s, **ask.options())
