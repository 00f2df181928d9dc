"""Prompt lookup as a table, and its index beside a plain search of the whole text."""

from __future__ import annotations

import random

import pytest

from engine.ngram import NgramProposer
from engine.request import SequenceRequest
from engine.sampling import SamplingParams, StopConditions
from engine.sequence import Sequence


def sequence_of(token_ids, sequence_id="s"):
    stop = StopConditions(1000)
    return Sequence(SequenceRequest(sequence_id, tuple(token_ids), (), SamplingParams(), stop), 0, 0.0)


@pytest.mark.parametrize(
    ("text", "num_tokens", "expected"),
    [
        ([], 4, []),
        ([1], 4, []),
        ([1, 2, 3, 4], 4, []),
        ([1, 2, 9, 9, 1], 4, []),  # one token that was there before is too few
        ([1, 2, 3, 4, 5, 1, 2], 3, [3, 4, 5]),
        ([1, 2, 3, 4, 5, 1, 2], 1, [3]),
        ([1, 2, 3, 4, 1, 2, 5, 6, 1, 2], 2, [5, 6]),  # the last occurrence is followed
        ([8, 1, 2, 3, 9, 1, 2, 4, 8, 1, 2], 1, [3]),  # but a longer one before a later one
        ([7, 8, 1, 2, 3, 9, 8, 1, 2, 4, 7, 8, 1, 2], 1, [3]),
        ([1, 2, 3, 1, 2], 7, [3, 1, 2, 3, 1, 2, 3]),  # behind the end of the text it follows itself
        ([5, 5, 5], 4, [5, 5, 5, 5]),
    ],
)
def test_what_followed_the_longest_ngram_when_it_was_there_last_is_proposed(text, num_tokens, expected):
    proposer = NgramProposer(min_ngram=2, max_ngram=4)
    assert proposer.propose(sequence_of(text or [0]), num_tokens) == expected


def search(text, sizes, num_tokens):
    """The same by looking through the whole text."""
    for size in sizes:
        for start in range(len(text) - 1, size - 1, -1):
            if text[start - size : start] == text[-size:]:
                longer = list(text)
                for i in range(num_tokens):
                    longer.append(longer[start + i])
                return longer[len(text) :]
    return []


@pytest.mark.parametrize("seed", range(20))
def test_an_index_that_grows_finds_what_a_search_finds(seed):
    dice = random.Random(seed)
    min_ngram = dice.randrange(1, 4)
    max_ngram = dice.randrange(min_ngram, 6)
    proposer = NgramProposer(min_ngram, max_ngram)
    sequences = [
        sequence_of([dice.randrange(4) for _ in range(dice.randrange(1, 30))], f"s{n}") for n in (0, 1)
    ]
    num_found = 0
    for _ in range(60):
        sequence = dice.choice(sequences)
        expected = search(sequence.token_ids, range(max_ngram, min_ngram - 1, -1), 5)
        assert proposer.propose(sequence, 5) == expected
        num_found += bool(expected)
        for _ in range(dice.randrange(1, 6)):
            sequence.append(dice.randrange(4))
    assert num_found > 10


def test_a_sequence_that_left_leaves_nothing_behind():
    proposer = NgramProposer(2, 4)
    proposer.propose(sequence_of([1, 2, 3, 1, 2]), 4)
    proposer.forget("s")
    proposer.forget("never seen")
    assert proposer.propose(sequence_of([3, 1, 2]), 4) == []
    proposer.forget("s")
    assert not proposer._indexes
