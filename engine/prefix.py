"""Stable names for blocks by their content: a hash over everything from the first token to the block's end.

The chain starts at the model's fingerprint, so two models or dtypes never share a block. blake2b and not
a faster hash: prompts come from strangers, and one who could make two prefixes collide would read or
poison another's cache. Python's `hash` differs between processes and is never used.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

BlockHash = bytes
_DIGEST_BYTES = 16


def root_hash(model_fingerprint: str) -> BlockHash:
    return blake2b(model_fingerprint.encode(), digest_size=_DIGEST_BYTES).digest()


def block_hash(parent: BlockHash, token_ids: list[int]) -> BlockHash:
    data = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return blake2b(parent + data, digest_size=_DIGEST_BYTES).digest()


def extend_hashes(
    hashes: list[BlockHash], root: BlockHash, token_ids: list[int], block_size: int, num_blocks: int
) -> None:
    """Appends to `hashes` until it names the first `num_blocks` blocks of `token_ids`, which must be full."""
    for index in range(len(hashes), num_blocks):
        parent = hashes[index - 1] if index else root
        hashes.append(block_hash(parent, token_ids[index * block_size : (index + 1) * block_size]))
