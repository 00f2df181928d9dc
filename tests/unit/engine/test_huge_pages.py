from __future__ import annotations

import pytest
import torch

from engine.huge_pages import Slabs, allocate_huge


def test_memory_is_aligned_zero_and_writable() -> None:
    memory = allocate_huge(5_000_000)
    assert memory.nbytes == 5_000_000
    assert memory.data_ptr() % (2 * 2**20) == 0
    assert not memory.any()
    memory.fill_(7)
    assert bool((memory == 7).all())


def test_more_than_there_is_raises_and_takes_nothing() -> None:
    with pytest.raises(OSError, match=r"\w"):
        allocate_huge(2**60)


def test_what_slabs_give_never_overlaps() -> None:
    slabs = Slabs()
    taken = [slabs.take(size, torch.bfloat16) for size in (3, 1000, 40 * 2**20, 1, 77)]
    for value, tensor in enumerate(taken):
        tensor.fill_(value)
    for value, tensor in enumerate(taken):
        assert bool((tensor == value).all())
        assert tensor.data_ptr() % 64 == 0
