"""Reading and writing the bytes of blocks, apart from whatever memory they lie in.

A cell is one layer of one block, `layout.layer_bytes` long. A block's cells are neighbours in memory, so
some of its layers are one piece of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from engine.kv_pool import KVPool
from kv_transfer.layout import KVLayout

_T = TypeVar("_T")
# Bytes of one frame: in host memory, or a flat tensor of bytes wherever it lies.
Payload = memoryview | torch.Tensor


def host_bytes(payload: Payload) -> memoryview:
    """A copy only of what lies on a GPU."""
    return payload if isinstance(payload, memoryview) else payload.cpu().numpy().data


class BlockStore(Protocol):
    """The blocks of one pool as bytes. Called from KV threads, never from the engine's.

    Safety: a caller reads only cells that are final and held for it, and writes only blocks that are
    reserved for it. The store itself checks neither.
    """

    layout: KVLayout

    def read(self, block_ids: Sequence[int], layers: range) -> list[memoryview]:
        """A piece for each block, perhaps not a copy: valid while the blocks are held."""
        ...

    def write(self, block_ids: Sequence[int], layers: range, data: Payload) -> None:
        """`data` is exactly the pieces of these blocks, one behind the other."""
        ...


class HostBlocks:
    """Blocks in this process's memory: an array [num_blocks, block_bytes] of bytes."""

    def __init__(self, layout: KVLayout, array: npt.NDArray[np.uint8]) -> None:
        self.layout = layout
        self.array = array
        self._cells = array.reshape(len(array), layout.num_layers, layout.layer_bytes)
        self._flat = memoryview(array.reshape(-1))  # type: ignore[arg-type]  # numpy's stubs lack the protocol

    def read(self, block_ids: Sequence[int], layers: range) -> list[memoryview]:
        begin, end = (layer * self.layout.layer_bytes for layer in (layers.start, layers.stop))
        starts = [block_id * self.layout.block_bytes for block_id in block_ids]
        return [self._flat[start + begin : start + end] for start in starts]

    def is_stretch(self, block_ids: Sequence[int], layers: range) -> bool:
        """Whether they lie one behind the other."""
        is_whole = len(block_ids) == 1 or len(layers) == self.layout.num_layers
        return is_whole and all(second - first == 1 for first, second in pairwise(block_ids))

    def stretch(self, block_ids: Sequence[int], layers: range) -> memoryview:
        """As one piece. Raises ValueError where they are none."""
        if not self.is_stretch(block_ids, layers):
            raise ValueError(f"layers {layers} of blocks {block_ids} are no stretch of memory")
        begin = block_ids[0] * self.layout.block_bytes + layers.start * self.layout.layer_bytes
        return self._flat[begin : begin + len(block_ids) * len(layers) * self.layout.layer_bytes]

    def write(self, block_ids: Sequence[int], layers: range, data: Payload) -> None:
        """One step of Python for all blocks, and other threads run while the bytes are copied."""
        pieces = np.frombuffer(host_bytes(data), np.uint8).reshape(len(block_ids), len(layers), -1)
        self._cells[_rows(block_ids), layers.start : layers.stop] = pieces

    def write_cells(self, block_ids: Sequence[int], cells: Cells) -> None:
        """`write`, straight from where the cells lie: their bytes are copied once."""
        layers = slice(cells.layers.start, cells.layers.stop)
        num_straight = 0
        if isinstance(cells.store, HostBlocks):
            num_straight = len(block_ids) - (cells.num_tail_tokens is not None)
            for here, there in _runs(block_ids[:num_straight], cells.block_ids[:num_straight]):
                self._cells[here, layers] = cells.store._cells[there, layers]
        if num_straight < len(block_ids):
            for block_id, piece in zip(block_ids[num_straight:], cells.pieces[num_straight:], strict=True):
                self._cells[block_id, layers] = np.frombuffer(piece, np.uint8).reshape(len(cells.layers), -1)


class BufferBlocks(HostBlocks):
    """A store in plain memory: for tests, and for measuring a transport without an engine."""

    def __init__(self, num_blocks: int, layout: KVLayout) -> None:
        super().__init__(layout, np.zeros((num_blocks, layout.block_bytes), dtype=np.uint8))


class DeviceBlocks:
    """A GPU's blocks. Copies run on a stream of their own, behind what the engine's stream (the default one)
    had been given before; a thread sleeps until its copy's event.

    On their way to and from the host bytes pass through pinned memory, which torch keeps and gives out again.
    """

    def __init__(self, pool: KVPool) -> None:
        self.layout = pool.layout
        self._pool = pool
        self.device = pool.tensor.device
        self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def read(self, block_ids: Sequence[int], layers: range) -> list[memoryview]:
        with self.copying():
            cells = self.gather(block_ids, layers)
            host = torch.empty(cells.shape, dtype=torch.uint8, pin_memory=True)
            host.copy_(cells, non_blocking=True)
        return [memoryview(piece) for piece in host.view(len(block_ids), -1).numpy()]

    def write(self, block_ids: Sequence[int], layers: range, data: Payload) -> None:
        if isinstance(data, memoryview):
            host = torch.empty(len(data), dtype=torch.uint8, pin_memory=True)
            host.numpy()[:] = data
            data = host
        with self.copying():
            pool = self._pool.tensor
            cells = data.to(self.device, non_blocking=True).view(pool.dtype)
            shape = (len(block_ids), len(layers), *pool.shape[2:])
            pool[list(block_ids), layers.start : layers.stop] = cells.view(shape)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """What is begun inside is done at the end."""
        self.stream.wait_stream(torch.cuda.default_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield
            # Blocking: whoever waits for it sleeps.
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record()
        done.synchronize()

    def gather(self, block_ids: Sequence[int], layers: range) -> torch.Tensor:
        """The cells as flat bytes on the device, once the current stream gets there."""
        cells = self._pool.tensor[list(block_ids), layers.start : layers.stop]
        return cells.contiguous().view(-1).view(torch.uint8)


def pool_blocks(pool: KVPool) -> BlockStore:
    if pool.tensor.device.type == "cpu":
        return HostBlocks(pool.layout, pool.host_bytes())
    return DeviceBlocks(pool)


class Cells:
    """Some layers of some blocks, all final and held: what one frame ships, where it lies.

    `num_tail_tokens`: of the last block only so many tokens are written. What a pool holds behind them is
    somebody's older KV, or garbage, and is not shipped: zeros are.
    """

    def __init__(
        self, store: BlockStore, block_ids: Sequence[int], layers: range, num_tail_tokens: int | None = None
    ) -> None:
        self.store = store
        self.block_ids = block_ids
        self.layers = layers
        self.num_tail_tokens = num_tail_tokens

    @property
    def num_bytes(self) -> int:
        return len(self.block_ids) * len(self.layers) * self.store.layout.layer_bytes

    @cached_property
    def pieces(self) -> list[memoryview]:
        """One for each block, in order, in host memory."""
        pieces = self.store.read(self.block_ids, self.layers)
        if self.num_tail_tokens is not None:
            pieces[-1] = _written_part(self.store.layout, pieces[-1], self.num_tail_tokens)
        return pieces

    def gathered(self, store: DeviceBlocks) -> torch.Tensor:
        """All of them as flat bytes on the device of `store`, theirs, once the current stream gets there."""
        flat = store.gather(self.block_ids, self.layers)
        if self.num_tail_tokens is not None:
            last = flat.view(len(self.block_ids), *_by_token(store.layout))[-1]
            last[:, self.num_tail_tokens :] = 0
        return flat


def neighbours(block_ids: Sequence[int]) -> list[int]:
    """Where the list is cut so that each part lies together in memory: how many blocks are in each part,
    negative where they lie there the other way round."""
    lengths: list[int] = []
    for first, second in pairwise((None, *block_ids)):
        step = 0 if first is None or second is None else second - first
        grows = lengths and step in (1, -1) and (abs(lengths[-1]) == 1 or (lengths[-1] > 0) == (step > 0))
        if grows:
            lengths[-1] = step * (abs(lengths[-1]) + 1)
        else:
            lengths.append(1)
    return lengths


def parts(items: Sequence[_T], neighbours: Sequence[int]) -> Iterator[Sequence[_T]]:
    """What belongs to blocks, cut and turned as they lie in memory."""
    begin = 0
    for length in neighbours:
        end = begin + abs(length)
        yield items[begin:end] if length > 0 else items[begin:end][::-1]
        begin = end


def _rows(block_ids: Sequence[int]) -> slice | list[int]:
    """An index of an array of blocks; numpy copies half as fast by a list."""
    if all(second - first == 1 for first, second in pairwise(block_ids)):
        return slice(block_ids[0], block_ids[0] + len(block_ids))
    return list(block_ids)


def _by_token(layout: KVLayout) -> tuple[int, int, int]:
    """Bytes of any layers of a block: [layers * 2 * num_kv_heads, block_size, bytes of a token's head]."""
    return (-1, layout.block_size, layout.layer_bytes // (2 * layout.num_kv_heads * layout.block_size))


def _written_part(layout: KVLayout, piece: memoryview, num_tokens: int) -> memoryview:
    """A copy of [layers, 2, num_kv_heads, block_size, head_dim] with zeros behind the first tokens."""
    copy = np.frombuffer(piece, dtype=np.uint8).copy()
    copy.reshape(_by_token(layout))[:, num_tokens:] = 0
    return memoryview(copy)


def _runs(first: Sequence[int], second: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Two lists of ids, cut where either stops going on in even steps: blocks that were given back together
    are given out in order, or in reverse."""
    begin = 0
    while begin < len(first):
        end, steps = begin + 1, (1, 1)
        if end < len(first):
            steps = first[end] - first[begin], second[end] - second[begin]
        while end < len(first) and (first[end] - first[end - 1], second[end] - second[end - 1]) == steps:
            end += 1
        yield _slice(first[begin], end - begin, steps[0]), _slice(second[begin], end - begin, steps[1])
        begin = end


def _slice(start: int, count: int, step: int) -> slice:
    stop = start + count * step
    return slice(start, stop if stop >= 0 else None, step)
