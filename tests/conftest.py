"""For every test: one thread of arithmetic, and nothing left behind."""

from __future__ import annotations

import torch

from tests.integrity import nothing_leaks

__all__ = ["nothing_leaks"]

# Tests share the machine's cores with the processes that they start.
torch.set_num_threads(1)
