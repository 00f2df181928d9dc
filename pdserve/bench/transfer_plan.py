"""How much `pdserve bench transfer` measures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plan:
    tokens: tuple[int, ...]
    num_rounds: int
    # Real requests of each size; None: fewer of what takes longer.
    num_requests_each: int | None
    max_num_batched_tokens: int
    num_warm_requests: int = 2

    def num_requests(self, num_tokens: int) -> int:
        if self.num_requests_each is not None:
            return self.num_requests_each
        return min(100, max(10, 40_000 // num_tokens))

    def num_rounds_in_all(self, num_transports: int) -> int:
        """Steps of progress: rounds of raw transfers, and requests."""
        num_requests = sum(self.num_requests(num_tokens) for num_tokens in self.tokens)
        return num_transports * (self.num_rounds + num_requests)


def parse_tokens(text: str) -> tuple[int, ...]:
    """ "64,1000" → (64, 1000). Raises ValueError."""
    numbers = [word.strip() for word in text.split(",")]
    if not all(number.isascii() and number.isdigit() and int(number) > 0 for number in numbers):
        raise ValueError(f"{text!r} is not a list of prompt lengths like 64,1000,4000")
    return tuple(sorted({int(number) for number in numbers}))
