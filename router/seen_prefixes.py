"""Which beginnings of prompts were computed before, so that they may lie in some worker's cache."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b

_STRIDE = 256
_MAX_SEEN = 8192


class SeenPrefixes:
    """In strides of tokens; the longest unused ones are forgotten. Nothing says that a cache has it still."""

    def __init__(self, max_seen: int = _MAX_SEEN) -> None:
        self._max_seen = max_seen
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def note(self, token_ids: Sequence[int]) -> None:
        for digest in _digests(token_ids):
            self._seen[digest] = None
            self._seen.move_to_end(digest)
        while len(self._seen) > self._max_seen:
            self._seen.popitem(last=False)

    def num_tokens(self, token_ids: Sequence[int]) -> int:
        """Of the longest beginning that was seen; one behind its last whole stride counts as seen too."""
        num_strides = 0
        for digest in _digests(token_ids):
            if digest not in self._seen:
                break
            num_strides += 1
        return min(len(token_ids), (num_strides + 1) * _STRIDE) if num_strides else 0


def _digests(token_ids: Sequence[int]) -> Iterator[bytes]:
    """Of each whole stride and all before it."""
    hasher, num_strides = blake2b(digest_size=8), len(token_ids) // _STRIDE
    for stride in range(num_strides):
        hasher.update(array("I", token_ids[stride * _STRIDE : (stride + 1) * _STRIDE]).tobytes())
        yield hasher.digest()
