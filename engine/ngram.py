"""Drafts by prompt lookup: what followed the last tokens when they stood in the text before.

Prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding), "ngram" in vLLM and
transformers. Here each sequence has an index of its own prompt and output that grows with it, so that a
proposal costs a few dictionary operations, however long the text.
"""

from __future__ import annotations

from engine.sequence import Sequence


class NgramProposer:
    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        """The longest of the last `min_ngram` to `max_ngram` tokens that stood there before is followed."""
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._indexes: dict[str, _NgramIndex] = {}

    def propose(self, sequence: Sequence, num_tokens: int) -> list[int]:
        index = self._indexes.get(sequence.sequence_id)
        if index is None:
            index = self._indexes[sequence.sequence_id] = _NgramIndex(self._sizes)
        return index.continued(sequence.token_ids, num_tokens)

    def forget(self, sequence_id: str) -> None:
        self._indexes.pop(sequence_id, None)


class _NgramIndex:
    """Where each n-gram of one text ended last, for every n of `sizes` (the longest first)."""

    def __init__(self, sizes: range) -> None:
        # n → n-gram → the position behind it. Only n-grams that something follows are in it.
        self._ends: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in sizes}
        self._num_indexed = 0

    def continued(self, token_ids: list[int], num_tokens: int) -> list[int]:
        """`token_ids` is the text, of which only the end may be new since the last call."""
        self._catch_up(token_ids)
        for size, ends in self._ends.items():
            start = ends.get(tuple(token_ids[-size:]))
            if start is not None:
                period = len(token_ids) - start  # behind the end of the text the draft follows itself
                return [token_ids[start + i % period] for i in range(num_tokens)]
        return []

    def _catch_up(self, token_ids: list[int]) -> None:
        end = len(token_ids)
        for size, ends in self._ends.items():
            first = max(self._num_indexed, size)
            if first < end:
                columns = (token_ids[first - size + i : end - size + i] for i in range(size))
                ends.update(zip(zip(*columns, strict=True), range(first, end), strict=True))
        self._num_indexed = end
