"""Memory that is read from end to end again and again, in pages of 2 MiB where the system has them.

A step reads all weights once: with 4 KiB pages looking up addresses costs as much as the reading, above all
in a virtual machine, where each look-up walks two tables.
"""

from __future__ import annotations

import mmap
import sys

import torch

_PAGE_BYTES = 2 * 2**20
_LINE_BYTES = 64
# What a slab holds at least. Pages that nothing was written to take no memory.
_SLAB_BYTES = 64 * 2**20


def allocate_huge(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes], zero, aligned to 2 MiB. Huge pages are asked for, not promised. Raises OSError where
    there is no room.
    """
    try:
        memory = mmap.mmap(-1, num_bytes + _PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OverflowError, ValueError) as error:
        raise OSError(str(error)) from error
    if sys.platform == "linux":
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without them
    flat = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping alive
    skipped = -flat.data_ptr() % _PAGE_BYTES
    return flat[skipped : skipped + num_bytes]


class Slabs:
    """Tensors side by side in huge pages. What is taken is given back only with all of its slab."""

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._num_used = 0

    def take(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros, flat, aligned to a cache line."""
        num_bytes = num_elements * dtype.itemsize
        if self._num_used + num_bytes > self._slab.nbytes:
            self._slab = allocate_huge(max(num_bytes, _SLAB_BYTES))
            self._num_used = 0
        taken = self._slab[self._num_used : self._num_used + num_bytes]
        self._num_used += -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
        return taken.view(dtype)
