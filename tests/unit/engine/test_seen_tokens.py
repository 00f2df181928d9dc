from __future__ import annotations

import random
from collections import Counter

from engine.seen_tokens import SeenTokens


def counted(seen: SeenTokens) -> dict[int, int]:
    return dict(zip(seen.token_ids.tolist(), seen.counts.tolist(), strict=True))


def test_prompt_tokens_are_seen_and_drawn_ones_counted():
    seen = SeenTokens((5, 3, 5), (3, 8))
    assert counted(seen) == {5: 0, 3: 1, 8: 1}
    seen.add(8)
    assert counted(seen) == {5: 0, 3: 1, 8: 2}


def test_thousands_of_tokens_are_counted_as_they_come():
    dice = random.Random(0)
    prompt = [dice.randrange(500) for _ in range(100)]
    output = [dice.randrange(2000) for _ in range(4000)]
    seen = SeenTokens(prompt, ())
    for token_id in output:
        seen.add(token_id)
    assert counted(seen) == dict.fromkeys(prompt, 0) | Counter(output)
    assert counted(SeenTokens(prompt, output)) == counted(seen)


def test_one_more_leaves_the_first_as_it_was():
    seen = SeenTokens((), (1,))
    assert counted(seen.and_one(1).and_one(2)) == {1: 2, 2: 1}
    assert counted(seen) == {1: 1}
