"""Which cells (a layer of a block) of a reservation are there."""

from __future__ import annotations

import numpy as np

from kv_transfer.frame import Blocks


class Coverage:
    """Cached blocks are there from the start."""

    def __init__(self, num_blocks: int, num_layers: int, num_cached_blocks: int) -> None:
        self._is_there = np.zeros((num_blocks, num_layers), np.bool_)
        self._is_there[:num_cached_blocks] = True
        self.num_missing = (num_blocks - num_cached_blocks) * num_layers

    def is_due(self, frame: Blocks) -> bool:
        """All cells of the frame exist, and none is there."""
        num_blocks, num_layers = self._is_there.shape
        blocks, layers = frame.blocks, frame.layers
        is_inside = len(blocks) > 0 and blocks.stop <= num_blocks and len(layers) > 0
        return is_inside and layers.stop <= num_layers and not self._cells(frame).any()

    def add(self, frame: Blocks) -> None:
        self._cells(frame)[:] = True
        self.num_missing -= frame.num_blocks * frame.num_layers

    def _cells(self, frame: Blocks) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
        blocks, layers = frame.blocks, frame.layers
        return self._is_there[blocks.start : blocks.stop, layers.start : layers.stop]
