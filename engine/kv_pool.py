"""The memory of the KV cache. It knows bytes and blocks; who uses which block is the block manager's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import EngineError
from engine.huge_pages import allocate_huge
from engine.layout import DTYPES, KVLayout

# Gives `num_bytes` of uninitialised memory on a device, as a flat uint8 tensor.
AllocateMemory = Callable[[int, torch.device], torch.Tensor]


def allocate_memory(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Pages of a CPU pool are taken when they are first written, not here. Raises EngineError."""
    try:
        if device.type == "cpu":
            return allocate_huge(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except (OSError, RuntimeError) as error:
        size = f"{num_bytes / 2**30:.1f} GiB"
        raise EngineError(
            f"there is no room for a KV pool of {size} on {device}: lower engine.kv_cache or num_blocks"
        ) from error


class KVPool:
    """`tensor` is `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`: one block of all layers
    is one contiguous piece of `block_bytes`, so moving a block is one copy.

    Slots that were never written hold anything, NaN included.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        device: torch.device,
        allocate: AllocateMemory = allocate_memory,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_bytes = layout.block_bytes
        memory = allocate(num_blocks * self.block_bytes, device)
        self.tensor = memory.view(DTYPES[layout.dtype]).view(num_blocks, *layout.block_shape)
        self._bytes = memory.view(num_blocks, self.block_bytes)

    def host_bytes(self) -> npt.NDArray[np.uint8]:
        """The whole pool [num_blocks, block_bytes], writable, without a copy. CPU pools only."""
        if self._bytes.device.type != "cpu":
            raise ValueError("a pool on a GPU has no view in host memory")
        view: npt.NDArray[np.uint8] = self._bytes.numpy()
        return view

    def block_view(self, block_id: int) -> memoryview:
        """One block's bytes, writable, without a copy. CPU pools only."""
        if self._bytes.device.type != "cpu":
            raise ValueError("a block on a GPU has no view in host memory")
        return self._bytes[block_id].numpy().data

    def poison(self, block_ids: Sequence[int]) -> None:
        """Fill blocks with NaN, so that a read of what was never written shows."""
        self.tensor[list(block_ids)] = float("nan")
