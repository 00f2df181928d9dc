"""How many cores the arithmetic uses."""

from __future__ import annotations

import torch


def use_threads(num_threads: int) -> None:
    """For the whole process, threads started later included."""
    torch.set_num_threads(num_threads)


def threads_in_use() -> int:
    return torch.get_num_threads()
