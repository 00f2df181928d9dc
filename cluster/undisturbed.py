"""Ctrl-C while a cluster ends: a half that is left is worse than a moment's wait."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType

_NUMBERS = (signal.SIGINT, signal.SIGTERM)
NUM_ANSWERED = 2


@contextmanager
def undisturbed(tell: Callable[[str], None]) -> Iterator[None]:
    """SIGINT and SIGTERM stop the work inside at the third time only, by KeyboardInterrupt; those before are
    answered by a word. `tell` is called on a thread: what a signal's handler interrupts may be writing too.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    words: SimpleQueue[str | None] = SimpleQueue()
    num_signals = 0

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals > NUM_ANSWERED:
            raise KeyboardInterrupt
        left = NUM_ANSWERED + 1 - num_signals
        again = "once more" if left == 1 else "twice more"
        words.put(f"still ending, a matter of seconds; Ctrl-C {again} leaves a part of it running")

    def tell_all() -> None:
        while (word := words.get()) is not None:
            tell(word)

    teller = threading.Thread(target=tell_all, name="tell-signals", daemon=True)
    teller.start()
    before = [signal.signal(number, on_signal) for number in _NUMBERS]
    try:
        yield
    finally:
        for number, handler in zip(_NUMBERS, before, strict=True):
            signal.signal(number, handler)
        words.put(None)
        teller.join()
