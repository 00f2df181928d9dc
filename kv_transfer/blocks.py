"""Reading and writing the bytes of single blocks, apart from whatever memory they lie in."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from engine.kv_pool import KVPool
from kv_transfer.layout import KVLayout


class BlockStore(Protocol):
    """The blocks of one pool as bytes. Called from KV threads, never from the engine's.

    Safety: a caller reads only blocks that are final and held for it, and writes only blocks that are
    reserved for it. The store itself checks neither.
    """

    block_bytes: int

    def read(self, block_id: int) -> memoryview:
        """The block's bytes, perhaps not a copy: valid while the block is held."""
        ...

    def write(self, block_id: int, data: memoryview) -> None:
        """`data` is exactly one block."""
        ...


class PoolBlocks:
    """An engine's pool. A GPU's blocks pass through host memory, on the stream that the engine computes on,
    so a copy sees what was computed before it."""

    def __init__(self, pool: KVPool) -> None:
        self.block_bytes = pool.block_bytes
        self._pool = pool
        self._is_on_host = pool.tensor.device.type == "cpu"

    def read(self, block_id: int) -> memoryview:
        if self._is_on_host:
            return self._pool.block_view(block_id)
        flat = self._pool.tensor[block_id].cpu().view(torch.uint8).flatten()
        return memoryview(flat.numpy())  # type: ignore[arg-type]  # numpy's stubs lack the buffer protocol

    def write(self, block_id: int, data: memoryview) -> None:
        if self._is_on_host:
            target = np.frombuffer(self._pool.block_view(block_id), dtype=np.uint8)
            np.copyto(target, np.frombuffer(data, dtype=np.uint8))  # lets other threads run meanwhile
            return
        block = self._pool.tensor[block_id]
        block.copy_(torch.frombuffer(bytearray(data), dtype=block.dtype).view(block.shape))


class BufferBlocks:
    """A store in plain memory: for tests, and for measuring a transport without an engine."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.array = np.zeros((num_blocks, block_bytes), dtype=np.uint8)

    def read(self, block_id: int) -> memoryview:
        return memoryview(self.array[block_id])

    def write(self, block_id: int, data: memoryview) -> None:
        self.array[block_id] = np.frombuffer(data, dtype=np.uint8)


def written_part(layout: KVLayout, block: memoryview, num_tokens: int) -> memoryview:
    """A copy of a block with everything behind its first `num_tokens` tokens zeroed.

    What a pool holds behind the written tokens is somebody's older KV, or garbage: it is not shipped.
    A block is [num_layers, 2, num_kv_heads, block_size, head_dim].
    """
    planes = layout.num_layers * 2 * layout.num_kv_heads
    copy = np.frombuffer(block, dtype=np.uint8).copy()
    copy.reshape(planes, layout.block_size, -1)[:, num_tokens:] = 0
    return memoryview(copy)
