"""Threads with room for calls that go deep. llguidance compiles a grammar by recursion, and where its code,
which is Rust, finds no stack left, it takes the process with it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Four times what the deepest grammars of 64 KiB were seen to need. Only what is used takes memory.
_STACK_BYTES = 256 * 2**20


@contextmanager
def deep_stack() -> Iterator[None]:
    """Threads that are started inside have it."""
    before = threading.stack_size(_STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(before)
