"""The pool's memory, where there is none."""

from __future__ import annotations

import pytest
import torch

from engine.errors import EngineError
from engine.kv_pool import allocate_memory


def test_a_pool_that_no_memory_holds_is_refused_in_our_words() -> None:
    told = r"no room for a KV pool of 1073741824\.0 GiB on cpu: lower engine\.kv_cache or num_blocks"
    with pytest.raises(EngineError, match=told):
        allocate_memory(2**60, torch.device("cpu"))
