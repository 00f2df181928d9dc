"""A KV pool in memory that a process of the same user on the same host can be handed: a memfd.

The blocks come first; behind them, on a page of its own, lies a nonce, by which whoever maps the memory sees
that it is the pool that was meant. It has no name in any file system, ends with the last process that maps
it, and is sealed: nobody can shrink it under the other's feet.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import sys
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from engine.kv_pool import allocate_memory
from kv_transfer.blocks import Cells, HostBlocks
from kv_transfer.layout import KVLayout
from kv_transfer.ways import WayUnusable

_NONCE_BYTES = 16
_LIBC = ctypes.CDLL(None)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MADV_POPULATE_READ = 22  # Linux 5.14; Python has no name for it


class SharedPool:
    """`descriptor` stays open, and the memory mapped, for as long as this object or its tensor lives."""

    def __init__(self, num_bytes: int) -> None:
        """Pages are taken when they are first written, as everywhere. Raises OSError."""
        if sys.platform != "linux":
            raise OSError("there is no memfd here")
        self.nonce = secrets.token_bytes(_NONCE_BYTES)
        self.descriptor = os.memfd_create("pdserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.descriptor)
        end = _end_of_blocks(num_bytes)
        os.ftruncate(self.descriptor, end + mmap.PAGESIZE)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
        memory = _mapped(self.descriptor, end + mmap.PAGESIZE)
        memory[end : end + _NONCE_BYTES] = self.nonce
        # Keeps the mapping alive.
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes)


class PoolMemory:
    """Allocates an engine's pool, shared where that can be had. `shared` is what was taken then; else
    `why_not` says why there is none."""

    def __init__(self) -> None:
        self.shared: SharedPool | None = None
        self.why_not = "no pool was taken"

    def __call__(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Raises EngineError where there is no room."""
        # A memfd of any size can be made, and fails when it is written: whether there is room shows here.
        private = allocate_memory(num_bytes, device)
        if device.type != "cpu":
            self.why_not = f"the pool is on {device}"
            return private
        try:
            self.shared = SharedPool(num_bytes)
        except OSError as error:
            self.why_not = f"this machine gives no shared memory: {error}"
            return private
        return self.shared.tensor


class MappedPool:
    """Another process's pool. Its pages count as resident in both processes, and are there once."""

    def __init__(self, blocks: HostBlocks) -> None:
        self.blocks = blocks
        self._taken: set[int] = set()

    @property
    def num_blocks(self) -> int:
        return len(self.blocks.array)

    def write(self, block_ids: Sequence[int], cells: Cells) -> None:
        """The first write to a block takes all its pages, in one call: one by one, as they are written, they
        cost several times as much. Where a chunk leaves by layers, the last ones then find them there."""
        new = sorted(set(block_ids) - self._taken)
        for run in _neighbours(new):
            self._take_pages(run)
        self._taken.update(new)
        self.blocks.write_cells(block_ids, cells)

    def _take_pages(self, run: range) -> None:
        block_bytes, address = self.blocks.layout.block_bytes, self.blocks.array.ctypes.data
        begin = run.start * block_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        # A kernel that does not know this lets them be taken one by one. Other threads run meanwhile.
        _LIBC.madvise(address + begin, run.stop * block_bytes - begin, _MADV_POPULATE_READ)


def _neighbours(block_ids: Sequence[int]) -> Iterator[range]:
    """Of ascending ids: the ranges of which they are made."""
    begin = 0
    for end in range(1, len(block_ids) + 1):
        if end == len(block_ids) or block_ids[end] != block_ids[end - 1] + 1:
            yield range(block_ids[begin], block_ids[end - 1] + 1)
            begin = end


def map_pool(descriptor: int, num_blocks: int, layout: KVLayout, nonce: bytes) -> MappedPool:
    """Raises WayUnusable."""
    num_bytes = num_blocks * layout.block_bytes
    end = _end_of_blocks(num_bytes)
    try:
        if os.fstat(descriptor).st_size != end + mmap.PAGESIZE:
            raise WayUnusable("its memory is not of the size that its blocks have here")
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise WayUnusable("its memory is not sealed")
        memory = _mapped(descriptor, end + mmap.PAGESIZE)
    except OSError as error:
        raise WayUnusable(f"its memory cannot be mapped: {error}") from error
    if memory[end : end + len(nonce)] != nonce:
        raise WayUnusable("its memory has another nonce than the reservation names")
    array = np.frombuffer(memory, np.uint8, num_bytes).reshape(num_blocks, layout.block_bytes)
    return MappedPool(HostBlocks(layout, array))


def _mapped(descriptor: int, num_bytes: int) -> mmap.mmap:
    """In huge pages, where the system's `shmem_enabled` gives them to shared memory."""
    memory = mmap.mmap(descriptor, num_bytes)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # a kernel without them
    return memory


def _end_of_blocks(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
