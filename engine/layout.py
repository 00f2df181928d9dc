"""The shape of the KV cache: what two engines must agree on before one block can move between them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """One block is `[num_layers, 2, num_kv_heads, block_size, head_dim]`, contiguous; K is 0, V is 1."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str  # a key of DTYPES
    model_fingerprint: str

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def layer_bytes(self) -> int:
        """One layer of one block: K and V of all heads, contiguous."""
        elements = 2 * self.num_kv_heads * self.block_size * self.head_dim
        return elements * DTYPES[self.dtype].itemsize

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.layer_bytes

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
