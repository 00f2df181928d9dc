"""What penalties ask about a sequence: which tokens it has, and how often each was drawn."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy

import numpy as np
import numpy.typing as npt

_FIRST_CAPACITY = 64


class SeenTokens:
    """Distinct tokens in arrays, kept up to date token by token: a step reads them as they lie."""

    def __init__(self, prompt: Iterable[int], output: Iterable[int]) -> None:
        distinct = list(dict.fromkeys(prompt))
        self._places = {token_id: place for place, token_id in enumerate(distinct)}
        capacity = max(_FIRST_CAPACITY, 2 * len(distinct))
        self._token_ids = np.zeros(capacity, np.int64)
        self._token_ids[: len(distinct)] = distinct
        self._counts = np.zeros(capacity, np.float32)
        for token_id in output:
            self.add(token_id)

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        return self._token_ids[: len(self._places)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """How often each of `token_ids` was drawn: 0 where it is the prompt's alone."""
        return self._counts[: len(self._places)]

    def add(self, token_id: int) -> None:
        """One more was drawn."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._token_ids):
            self._token_ids = np.resize(self._token_ids, 2 * place)
            self._counts = np.concatenate((self._counts, np.zeros(place, np.float32)))
        self._token_ids[place] = token_id
        self._counts[place] += 1

    def and_one(self, token_id: int) -> SeenTokens:
        """As it would be with one more drawn; it stays as it is itself."""
        more = copy(self)
        more._places = self._places.copy()
        more._token_ids = self._token_ids.copy()
        more._counts = self._counts.copy()
        more.add(token_id)
        return more
