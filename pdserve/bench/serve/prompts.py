"""Made-up prompts. Ids come from the middle of the vocabulary: tokenizers keep no special tokens there."""

from __future__ import annotations

import random
from dataclasses import replace

from pdserve.bench.serve.workload import Workload

# What every model of use has at least.
DEFAULT_VOCAB_SIZE = 30_000
# Short and frequent: about one token each, whatever the tokenizer.
_TEXT = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an
they which one you were all her she there would their we him been has when who will no more if out
so up what about into than them can only other time new some could these two may first then do any
like my now over such our man me even most made after also did many off before must well back
through years much where your way down should because long each just state people those too world
very make good year still see own work men day get here between life being under three never know
same last another while us might great go come since against right came take used himself few house
use place during high without again home around small however found part school once general water
left number point always fact public
"""
_WORDS = tuple(_TEXT.split())


class TokenPrompts:
    """Token ids drawn by seed: the same key, the same tokens."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._ids = range(vocab_size // 8, vocab_size - vocab_size // 8)
        self._seed = seed

    def make(self, num_tokens: int, *key: int) -> tuple[int, ...]:
        # Seeded by text: stable over versions of Python, and cheap for the many blocks of a trace.
        drawn = random.Random(repr((self._seed, key)))
        return tuple(drawn.choices(self._ids, k=num_tokens))


def in_words(workload: Workload) -> Workload:
    """The same workload as text, for servers that take no token ids: one word for each id, so that prompts
    that begin alike still do. How many tokens a prompt has then is for the server to say.
    """
    requests = tuple(
        request
        if isinstance(request.prompt, str)
        else replace(
            request,
            prompt=" ".join(_WORDS[token % len(_WORDS)] for token in request.prompt),
            num_prompt_tokens=None,
        )
        for request in workload.requests
    )
    return replace(workload, requests=requests)
