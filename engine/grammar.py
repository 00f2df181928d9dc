"""What the text of a sequence must look like, asked token by token. `engine/guidance.py` is what there is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

# Which tokens may come next: bits, token 0's the lowest of byte 0. At least as many as the vocabulary has.
Mask = npt.NDArray[np.uint8]


class Matcher(Protocol):
    """One sequence's place in its grammar. Changes with every token; the engine thread's."""

    @property
    def error(self) -> str | None:
        """Why nothing can be said of this sequence any more; its masks allow nothing from then on."""
        ...

    def append(self, token_id: int) -> None:
        """It was drawn, in prefill or here. EOS changes nothing: it is allowed where the text is whole."""
        ...

    def masks(self, drafts: Sequence[int] = ()) -> list[Mask]:
        """What may come next, and what behind each of the drafts; those are ones that may come."""
        ...

    def num_possible(self, token_ids: Sequence[int]) -> int:
        """How many of these may come next, one behind the other, before one that may not, or EOS. Fewer where
        that cannot be told.
        """
        ...


class Grammar(Protocol):
    """Never changes: known output is behind it already."""

    def begin(self) -> Matcher:
        """A sequence's own matcher. Costs microseconds."""
        ...


def without(mask: Mask, token_ids: frozenset[int]) -> Mask:
    """The mask without these, or as it is where it would then allow nothing: a grammar goes before bans."""
    if not token_ids:
        return mask
    ids = np.fromiter(token_ids, np.int64)
    left = mask.copy()
    np.bitwise_and.at(left, ids >> 3, ~np.left_shift(1, ids & 7).astype(np.uint8))
    return left if left.any() else mask
