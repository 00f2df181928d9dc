"""How long a prompt takes at least, and which beginnings of prompts may be cached: both hopeful."""

from __future__ import annotations

import random

from router.fleet.pace import Pace
from router.seen_prefixes import SeenPrefixes


def test_nothing_is_known_before_a_prompt_that_counts() -> None:
    pace = Pace()
    assert pace.least_s(10_000) == 0
    pace.note(16, 1.0)
    pace.note(5000, 0.0)
    assert pace.least_s(10_000) == 0


def test_a_prompt_takes_at_least_half_the_time_of_the_best_pace() -> None:
    pace = Pace()
    pace.note(1000, 1.0)
    assert pace.least_s(4000) == 2.0
    pace.note(1000, 0.5)
    assert pace.least_s(4000) == 1.0


def test_a_slower_prompt_counts_little_and_many_of_them_count() -> None:
    pace = Pace()
    pace.note(1000, 0.5)
    pace.note(1000, 1.0)
    assert 1.0 < pace.least_s(4000) < 1.1
    for _ in range(100):
        pace.note(1000, 1.0)
    assert 1.9 < pace.least_s(4000) <= 2.0


def test_an_idle_worker_is_tried_again_some_time_after_the_last_prompt_that_counted() -> None:
    now = 100.0
    pace = Pace(lambda: now)
    pace.note(300, 30.0)  # it met a compile
    now += 61.0
    assert pace.least_s(4000) == pace.least_s(4000, is_idle=False) == 200.0
    assert pace.least_s(4000, is_idle=True) == 0
    pace.note(4000, 2.0)
    assert pace.least_s(4000, is_idle=True) == 1.0


def test_a_seen_beginning_is_found_to_its_last_stride_and_a_little_more() -> None:
    seen, dice = SeenPrefixes(), random.Random(1)
    prompt = [dice.randrange(50_000) for _ in range(2000)]
    assert seen.num_tokens(prompt) == 0
    seen.note(prompt[:1000])
    assert seen.num_tokens(prompt) == 1024
    assert seen.num_tokens(prompt[:700]) == 700
    assert seen.num_tokens([prompt[0] + 1, *prompt[1:]]) == 0
    seen.note(prompt)
    assert seen.num_tokens(prompt) == 2000


def test_what_was_not_used_for_longest_is_forgotten() -> None:
    seen = SeenPrefixes(max_seen=8)
    prompts = [[number] * 512 for number in range(5)]
    for prompt in prompts:
        seen.note(prompt)
    assert [bool(seen.num_tokens(prompt)) for prompt in prompts] == [False, True, True, True, True]
